"""What a simulation holds does not grow with its length."""

import gc
import sys

import pytest

from pearl_executor.virtual_time import run_virtual
from pearl_planner.elastic import ElasticState
from pearl_rl.simulation import archive
from pearl_rl.simulation.cluster import SimulatedCluster
from pearl_rl.simulation.outcome import SimulationResult
from pearl_rl.simulation.scenario import scenario_from
from pearl_rl.simulation.workload import Script, ScriptedTurn, ScriptedWorkload
from pearl_state.effects import Effect
from pearl_state.events import Event, RolloutBegan

SHORT = 16
"""Steps after which what fills up to a bound has begun to: four times as many are compared with them."""
TURN = ScriptedTurn(prompt_tokens=100, response_tokens=20, tool_s=0.5, retained_tokens=20)
SCRIPTS = [Script(turns=(TURN,) * turns, root=f"task {turns}") for turns in (2, 3)]
"""Eight trajectories of a step have twenty turns together."""


def blocks_held(policy: str) -> dict[int, int]:
    """Step → blocks of memory that are allocated when it begins; trajectories are alike, so that little is new."""
    scenario = scenario_from(
        {
            "name": "small",
            "cluster": {"training_gpus": 2, "reserved_rollout_gpus": 4, "max_preemptible_gpus": 0},
            "availability": {"trace": "none"},
            "tp": 1,
            "rollout": {"batch": 8, "group_size": 4},
            "policy": {"name": policy},
            "run": {"steps": 4 * SHORT + 1},
        }
    )
    cluster = SimulatedCluster(scenario)
    cluster.workload = ScriptedWorkload(SCRIPTS)
    held: dict[int, int] = {}

    def look(event: Event, _state: ElasticState, _effects: tuple[Effect, ...]) -> None:
        if isinstance(event, RolloutBegan) and event.step in (SHORT, 4 * SHORT):
            gc.collect()
            held[event.step] = sys.getallocatedblocks()

    cluster.on_control.append(look)

    async def main() -> SimulationResult:
        return await cluster.run()

    assert len(run_virtual(main()).steps) == 4 * SHORT + 1
    return held


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        # A record of a step that is kept as an object is fifteen blocks; so is a block for each turn, nearly.
        ("pearl", 24),
        # Its forecasts remember the newest 512 durations of each class, which fill up at first.
        ("pearl+prorsa+tiderl", 100),
    ],
)
def test_a_longer_simulation_holds_no_more_memory(policy: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_BLOCK", 4)
    held = blocks_held(policy)
    assert (held[4 * SHORT] - held[SHORT]) / (3 * SHORT) < most
