"""Forecasts while a run goes on: when they are made, what they look at, and what a simulation shows of them."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_executor.virtual_time import SimulationDeadlockError, run_virtual
from pearl_planner.elastic import Borrowing, ElasticSettings, ElasticState, initial_state
from pearl_planner.forecast import WindowOutcome, WorkloadPredictor
from pearl_planner.in_step import prorsa
from pearl_planner.policies import pearl
from pearl_rl.control.forecasting import ForecastLoop, forecasting_for
from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.simulation.cluster import SimulatedCluster, run_to_end, simulate
from pearl_rl.simulation.data_parallel import DataParallelCosts
from pearl_rl.simulation.outcome import SimulationResult
from pearl_rl.simulation.scenario import scenario_from
from pearl_rl.simulation.workload import Script, ScriptedTurn, Workload
from pearl_state.events import Event, LoadForecast
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.worker import WorkerId

WORKLOAD = WorkloadProfile(batch=4, turns=2, new_prompt_tokens=100, response_tokens=10)
PLATFORM = PlatformProfile(
    decode_fixed_s=0.01,
    decode_per_sequence_s=0.001,
    prefill_per_token_s=0.001,
    kv_bytes_per_token=100.0,
    transfer_bytes_per_s=1e9,
    kv_capacity_bytes=1e6,
)
T = TrajectoryId("t00000000")


def state() -> ElasticState:
    return initial_state(
        settings=ElasticSettings(policy=prorsa(), borrowing=Borrowing.OFF),
        workload=WORKLOAD,
        platform=PLATFORM,
        training_gpus=1,
    )


def test_forecasts_come_every_horizon_while_trajectories_live_and_not_without() -> None:
    async def main() -> tuple[list[Event], list[WindowOutcome]]:
        posted: list[Event] = []
        windows: list[WindowOutcome] = []
        loop = ForecastLoop(WorkloadPredictor(), state=state, post=posted.append, on_window=windows.append)
        trace = LifecycleTrace(loop.observe)
        task = asyncio.create_task(loop.run())
        await asyncio.sleep(100.0)
        assert posted == [], "nothing lives"
        trace.sampled(T, GroupId("g"))
        trace.ready(T, 0, 500)
        await asyncio.sleep(25.0)
        trace.assigned(T, WorkerId(1))
        trace.answered(T, 510, WorkerId(1))
        trace.ended(T, accepted=True)
        await asyncio.sleep(100.0)
        task.cancel()
        return posted, windows

    posted, windows = run_virtual(main())
    forecasts = [event for event in posted if isinstance(event, LoadForecast)]
    assert [event.now_s for event in forecasts] == [100.0, 110.0, 120.0]
    assert [event.prefill_tokens for event in forecasts] == [500.0] * 3
    assert [event.live for event in forecasts] == [1, 1, 1]
    assert [(w.forecast.prefill_tokens, w.prefill_tokens) for w in windows] == [(500.0, 500.0)] * 2


def test_a_rollout_that_hangs_does_not_look_busy() -> None:
    async def main() -> None:
        loop = ForecastLoop(WorkloadPredictor(), state=state, post=lambda _event: None)
        LifecycleTrace(loop.observe).sampled(T, GroupId("g"))
        await loop.run()

    with pytest.raises(SimulationDeadlockError):
        run_virtual(main())


def test_only_policies_that_answer_forecasts_pay_for_them() -> None:
    assert forecasting_for(pearl()) is None
    assert forecasting_for(prorsa(), 2.0).predictor.settings.horizon_s == 2.0  # type: ignore[union-attr]


def document(policy: str, **sections: object) -> dict[str, object]:
    return {
        "name": "small",
        "cluster": {"training_gpus": 4, "reserved_rollout_gpus": 8, "max_preemptible_gpus": 0},
        "availability": {"trace": "none"},
        "rollout": {"batch": 16, "group_size": 4, "max_staleness": 0},
        "workload": {"max_turns": 12},
        "policy": {"name": policy, "borrowing": "off"},
        "run": {"steps": 2},
        **sections,
    }


def small(policy: str, **sections: object) -> SimulationResult:
    return simulate(scenario_from(document(policy, **sections)))


def test_a_simulated_run_switches_roles_inside_its_steps_and_loses_nothing() -> None:
    # Long prompts that come together at first, then responses: what the profile chose is soon wrong.
    result = small(
        "prorsa",
        workload={"model": "weka", "max_context_tokens": 131_072, "max_turns": 12},
        rollout={"batch": 64, "group_size": 4, "max_staleness": 0},
        cluster={"training_gpus": 4, "reserved_rollout_gpus": 16, "max_preemptible_gpus": 0},
        run={"steps": 1},
    )
    assert result.counts.lost_trajectories == 0
    assert result.counts.stale_served == 0
    assert result.counts.mode_switches == 0
    assert any(decision.trigger == "LoadForecast" and decision.reason == "forecast" for decision in result.decisions)
    assert result.prefill_forecasts.windows > 3
    brief = result.to_json(full=False)
    assert brief["prefill_forecast_wape"] == result.prefill_forecasts.wape
    assert brief["admission_forecast_wape"] == result.admission_forecasts.wape


class ChangedLater:
    """A workload whose trajectories call a tool for at least 300 s after two turns, and from then on follow `later`."""

    def __init__(self, base: Workload, later: int) -> None:
        self._base, self._later = base, later
        self.stable_fraction = base.stable_fraction

    def script(self, task: Task, sample: int) -> Script:
        """See `Workload`. The profile of earlier steps is not of this run: it stays as it is."""
        script = self._base.script(task, sample)
        if sample >= 10**8:
            return script
        before, other = script.turns[:2], 1 + self._later
        waits = replace(before[-1], tool_s=300.0 * other)
        after = ScriptedTurn(
            prompt_tokens=700 * other, response_tokens=50 * other, tool_s=3.0 * other, retained_tokens=9
        )
        return replace(script, turns=(*before[:-1], waits, *[after] * (3 * other)), reward=float(self._later))


def test_what_a_simulation_forecasts_does_not_know_what_will_be() -> None:
    """Whatever tools return after 300 s, and whatever is generated then: forecasts until then are the same."""

    def forecasts(later: int) -> list[LoadForecast]:
        found: list[LoadForecast] = []
        cluster = SimulatedCluster(
            scenario_from(
                document(
                    "prorsa",
                    workload={"model": "swe", "max_turns": 4},
                    rollout={"batch": 32, "group_size": 4, "max_staleness": 0},
                    cluster={"training_gpus": 4, "reserved_rollout_gpus": 16, "max_preemptible_gpus": 0},
                    run={"steps": 1},
                )
            )
        )
        cluster.workload = ChangedLater(cluster.workload, later)
        cluster.on_control.append(
            lambda event, _state, _effects: found.append(event) if isinstance(event, LoadForecast) else None
        )
        run_to_end(cluster)
        return found

    one, other = forecasts(0), forecasts(1)

    def until(at_s: float, of: list[LoadForecast]) -> list[LoadForecast]:
        return [forecast for forecast in of if forecast.now_s < at_s]

    assert until(300.0, one) == until(300.0, other)
    assert len([each for each in until(300.0, one) if each.prefill_tokens > 0]) > 10
    assert until(500.0, one) != until(500.0, other), "then it is seen"


def test_prorsa_begins_with_a_ratio_for_all_batches_that_will_be_under_way() -> None:
    def first(policy: str, batch: int, staleness: int) -> str:
        result = small(
            policy,
            workload={"model": "swe", "max_turns": 4},
            rollout={
                "batch": batch,
                "group_size": 8,
                "max_staleness": staleness,
                "injection": "continuous" if staleness else "batch",
            },
            cluster={"training_gpus": 4, "reserved_rollout_gpus": 16, "max_preemptible_gpus": 0},
            run={"steps": 1},
        )
        return next(each.configuration for each in result.timeline if each.configuration)

    alone, many = first("prorsa", 8, 0), first("prorsa", 128, 0)
    assert first("prorsa", 8, 15) == many != alone


def test_the_composition_colocates_single_turns_as_pearl_does() -> None:
    math = {"max_turns": 1, "response_scale": 30.0, "tool_scale": 0.0}
    both, alone = (small(policy, workload=math, run={"steps": 1}) for policy in ("pearl+prorsa", "pearl"))
    assert {interval.configuration for interval in both.timeline if interval.configuration} >= {"4C"}
    assert both.timeline[-1].configuration == "4C"
    assert both.throughput == pytest.approx(alone.throughput)


class LinearCosts:
    """A millisecond an iteration, and one for each token."""

    def prefill_s(self, chunks, finished, sequences=0, context_tokens=0.0) -> float:
        return 1e-3 + 1e-3 * (sum(tokens for tokens, _ in chunks) + sequences)

    def decode_curve(self, sequences):
        return sequences


def test_ranks_wait_for_the_busiest_of_them() -> None:
    costs = DataParallelCosts(LinearCosts(), 4)
    alone_s, even_s = costs.prefill_s([(100, 0)], 1), costs.prefill_s([(100, 0)] * 4, 4)
    assert alone_s == pytest.approx(even_s), "one prompt alone leaves three ranks idle"
    assert even_s == LinearCosts().prefill_s([(100, 0)] * 4, 4), "all ranks busy are the whole worker"
    assert costs.prefill_s([(100, 0), (60, 0), (40, 0), (30, 0), (20, 0)], 5) == pytest.approx(even_s)
    assert DataParallelCosts(LinearCosts(), 1).prefill_s([(100, 0)], 1) == LinearCosts().prefill_s([(100, 0)], 1)
    assert costs.decode_curve(7) == 7


@given(st.lists(st.integers(1, 600), min_size=1, max_size=12), st.integers(1, 8))
def test_ranks_take_at_least_as_long_as_the_whole_worker_would(chunks: list[int], ranks: int) -> None:
    parts = [(tokens, 0) for tokens in chunks]
    whole_s = LinearCosts().prefill_s(parts, len(parts))
    ranked_s = DataParallelCosts(LinearCosts(), ranks).prefill_s(parts, len(parts))
    assert ranked_s >= whole_s - 1e-12
    # Not longer than with all of them on one rank.
    assert ranked_s <= LinearCosts().prefill_s(parts * ranks, len(parts)) + 1e-12
