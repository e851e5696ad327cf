"""Task batching, readiness and evaluation in whole runs: by the policy's name, in virtual time and in the settings."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pearl_executor.virtual_time import run_virtual
from pearl_planner.readiness import BatchInterval, ReadinessSettings
from pearl_rl import parts
from pearl_rl.errors import SettingsError
from pearl_rl.rollout.pipeline_settings import Injection
from pearl_rl.rollout.readiness import ReadinessMonitor
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.testing import FakeGeneration
from pearl_rl.settings.load import load_settings
from pearl_rl.simulation.cluster import SimulatedCluster
from pearl_rl.simulation.outcome import SimulationResult
from pearl_rl.simulation.parameters import load_parameters
from pearl_rl.simulation.scenario import scenario_from
from pearl_state.decision import ScalingReason
from pearl_state.events import Event, ReadinessMeasured

TIDERL = ("tiderl", "pearl+tiderl", "pearl+prorsa+tiderl")


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", TIDERL)
def test_a_policy_with_tiderl_brings_injection_batching_and_readiness(policy: str) -> None:
    settings = load_settings(None, [f"planner.policy={policy}"]).settings
    router = Router(FakeGeneration())
    assert parts.policy(settings).name == policy
    assert parts.policy(settings).expands is (policy != "tiderl")
    assert parts.pipeline_settings(settings).injection is Injection.CONTINUOUS
    assert parts.task_gate(settings, router) is not None
    assert parts.readiness(settings, lambda _event: None, None) is not None


def test_every_other_policy_brings_none_of_them_unless_it_is_asked_for() -> None:
    router = Router(FakeGeneration())
    plain = load_settings(None, ["planner.policy=pearl+prorsa"]).settings
    assert parts.pipeline_settings(plain).injection is Injection.BATCH
    assert parts.task_gate(plain, router) is None
    assert parts.readiness(plain, lambda _event: None, None) is None
    asked = ["rollout.injection=continuous", "rollout.task_batching=on", "planner.readiness=on"]
    chosen = load_settings(None, asked).settings
    assert parts.pipeline_settings(chosen).injection is Injection.CONTINUOUS
    assert parts.task_gate(chosen, router) is not None
    assert parts.readiness(chosen, lambda _event: None, None) is not None
    off = ["planner.policy=pearl+tiderl", "rollout.injection=batch", "rollout.task_batching=off"]
    declined = load_settings(None, off).settings
    assert parts.pipeline_settings(declined).injection is Injection.BATCH
    assert parts.task_gate(declined, router) is None


def test_a_budget_that_holds_no_trajectory_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"does not hold one trajectory .* use engine.kv_tokens=1024 or more"):
        load_settings(None, ["planner.policy=pearl+tiderl", "engine.kv_tokens=600", "rollout.kv_budget_fraction=0.5"])


# ---- readiness ------------------------------------------------------------------------------------------------------


def measured(drive: Callable[[ReadinessMonitor], None], **evaluates: Any) -> list[ReadinessMeasured]:
    events: list[Event] = []
    settings = ReadinessSettings(batch=BatchInterval(minimum=8, ideal=8))
    drive(ReadinessMonitor(settings, group_size=4, post=events.append, **evaluates))
    assert all(isinstance(event, ReadinessMeasured) for event in events)
    return events  # type: ignore[return-value]


def test_groups_that_come_slower_than_training_takes_them_are_a_generation_deficit() -> None:
    def drive(monitor: ReadinessMonitor) -> None:
        monitor.began(0, 0.0)
        monitor.ready(1, 10.0)
        monitor.ready(2, 30.0)
        monitor.taken(2)
        monitor.boundary(1, 1, 8, 6.0, 36.0)

    cold, deficit = measured(drive)
    assert cold.reason is ScalingReason.COLD_START
    assert deficit == ReadinessMeasured(
        now_s=36.0, step=1, reason=ScalingReason.GENERATION_DEFICIT, volume=8, ready=0, interval_s=20.0, group_s=3.0,
        head_of_line_s=0.0, step_s=36.0,
    )  # fmt: skip


def test_groups_that_wait_longer_than_a_step_are_a_consumption_deficit() -> None:
    def drive(monitor: ReadinessMonitor) -> None:
        monitor.began(0, 0.0)
        monitor.ready(5, 1.0)
        monitor.taken(2)
        monitor.boundary(1, 1, 8, 5.0, 10.0)
        monitor.taken(2)
        monitor.boundary(2, 2, 8, 5.0, 20.0)

    _, first, second = measured(drive)
    assert (first.reason, first.ready, first.head_of_line_s) == (ScalingReason.BALANCED, 12, 9.0)
    assert (second.reason, second.ready, second.head_of_line_s) == (ScalingReason.CONSUMPTION_DEFICIT, 4, 19.0)


def test_an_evaluation_that_is_about_to_begin_comes_before_deficits() -> None:
    def drive(monitor: ReadinessMonitor) -> None:
        monitor.began(0, 0.0)
        for version in (1, 2):
            monitor.boundary(version, version, 8, 5.0, 10.0 * version)

    reasons = [event.reason for event in measured(drive, evaluates=lambda version: version == 2)]
    assert reasons == [ScalingReason.COLD_START, ScalingReason.BALANCED, ScalingReason.EVALUATION]


# ---- whole simulations ----------------------------------------------------------------------------------------------


def run(policy: str, **rollout: Any) -> tuple[SimulationResult, list[Event]]:
    """A small cluster whose workers' KV holds a fraction of the trajectories under way."""
    scenario = scenario_from(
        {
            "name": "narrow",
            "cluster": {"training_gpus": 4, "reserved_rollout_gpus": 4, "max_preemptible_gpus": 0},
            "availability": {"trace": "none"},
            "rollout": {"batch": 32, "group_size": 8, "max_staleness": 1, **rollout},
            "workload": {"max_turns": 12, "max_context_tokens": 8192},
            "policy": {"name": policy},
            "run": {"steps": 3},
        }
    )
    cluster = SimulatedCluster(scenario, load_parameters(scenario.parameters, scenario.model))
    cluster.limits = replace(cluster.limits, kv_tokens=30_000)
    events: list[Event] = []
    seen: Callable[..., None] = lambda event, *_: events.append(event)  # noqa: E731
    cluster.on_control.append(seen)
    return run_virtual(cluster.run()), events


def test_task_batching_keeps_prefixes_that_thrash_without_it() -> None:
    with_, events = run("tiderl")
    without, _ = run("tiderl", task_batching="off")
    for result in (with_, without):
        assert [step.step for step in result.steps] == [1, 2, 3]
        assert result.counts.lost_trajectories == 0
        assert result.counts.stale_served == 0
    assert hit_rate(with_) > 1.15 * hit_rate(without)
    assert with_.engines.prefill_tokens < 0.9 * without.engines.prefill_tokens
    told = [event for event in events if isinstance(event, ReadinessMeasured)]
    assert [event.step for event in told] == [0, 1, 2, 3]
    assert told[0].reason is ScalingReason.COLD_START


def hit_rate(result: SimulationResult) -> float:
    engines = result.engines
    return engines.cached_tokens / (engines.cached_tokens + engines.prefill_tokens)
