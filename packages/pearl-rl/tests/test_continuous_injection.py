"""Continuous injection: groups enter beside the tail of those before, within the staleness bound, and none is lost."""

import asyncio
from functools import cache

import pytest

from pearl_executor.virtual_time import run_virtual
from pearl_rl.rollout.agent import Episode
from pearl_rl.rollout.batch_rollout import BatchRollout, RefillLimits
from pearl_rl.rollout.buffer import GroupBuffer, StalenessBound
from pearl_rl.rollout.calls import Generate
from pearl_rl.rollout.environments.protocol import EnvironmentFailure
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.testing import FakeGeneration, NumberedTasks
from pearl_rl.simulation.cluster import simulate
from pearl_rl.simulation.outcome import SimulationResult
from pearl_rl.simulation.scenario import scenario_from
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId


@cache
def run(policy: str, staleness: int, injection: str = "", parts: str = "auto") -> SimulationResult:
    return simulate(
        scenario_from(
            {
                "name": "small",
                "cluster": {"training_gpus": 4, "reserved_rollout_gpus": 8, "max_preemptible_gpus": 0},
                "availability": {"trace": "none"},
                "rollout": {
                    "batch": 16,
                    "group_size": 4,
                    "max_staleness": staleness,
                    "injection": injection,
                    "task_batching": parts,
                    "readiness": parts,
                    "straggler_patience": 0.0,
                },
                "workload": {"max_turns": 16, "max_context_tokens": 8192},
                "policy": {"name": policy},
                "run": {"steps": 5},
            }
        )
    )


@pytest.mark.parametrize(("policy", "staleness"), [("tiderl", 1), ("pearl+tiderl", 0), ("pearl+tiderl", 3)])
def test_every_step_is_made_within_the_bound_and_nothing_is_dropped(policy: str, staleness: int) -> None:
    result = run(policy, staleness)
    assert [step.step for step in result.steps] == [1, 2, 3, 4, 5]
    assert all(step.trajectories == 16 for step in result.steps)
    assert max(step.staleness_max for step in result.steps) == staleness
    assert result.counts.rejected_stale == 0
    assert result.counts.lost_trajectories == 0
    assert result.counts.stale_served == 0


def test_a_wider_bound_trains_more_tokens_a_second_than_whole_batches() -> None:
    batches, one, three = run("pearl", 3), run("pearl+tiderl", 1), run("pearl+tiderl", 3)
    assert one.training_goodput > 1.05 * batches.training_goodput
    assert three.training_goodput > 1.05 * one.training_goodput


def test_a_scenario_may_ask_for_whole_batches_under_any_policy() -> None:
    assert run("pearl+tiderl", 3, "batch", "off").training_goodput == run("pearl", 3).training_goodput


def test_a_group_is_due_when_one_more_version_would_make_a_sample_of_it_too_old() -> None:
    buffer = GroupBuffer(StalenessBound(max_staleness=1, batch=4), group_size=2, max_refills_per_group=1)
    for group in ("a", "b"):
        buffer.open(GroupId(group))
    buffer.dispatch(GroupId("a"), TrajectoryId("t1"), 0)
    buffer.dispatch(GroupId("a"), TrajectoryId("t2"), 2)
    buffer.dispatch(GroupId("b"), TrajectoryId("t3"), 2)
    assert [buffer.due(version) for version in (0, 1, 2, 3)] == [0, 1, 1, 2]
    for id_, version in (("t1", 0), ("t2", 2)):
        buffer.complete(sample(id_, "a", version), 2)
    assert [buffer.due(version) for version in (1, 2, 3)] == [0, 0, 1]


def straggling(patience: float, *, staleness: int = 1, steps: int = 6, seed: int = 1) -> SimulationResult:
    """A few trajectories are far longer than the others."""
    return simulate(
        scenario_from(
            {
                "name": "straggling",
                "cluster": {"training_gpus": 4, "reserved_rollout_gpus": 8, "max_preemptible_gpus": 0},
                "availability": {"trace": "none"},
                "rollout": {
                    "batch": 16,
                    "group_size": 4,
                    "max_staleness": staleness,
                    "straggler_patience": patience,
                },
                "workload": {
                    "max_turns": 60,
                    "max_context_tokens": 32_768,
                    "turns_scale": 0.5,
                    "turns_spread": 3.0,
                    "response_scale": 1.0,
                    "prompt_scale": 0.2,
                    "first_prompt_scale": 0.1,
                    "tool_scale": 0.2,
                },
                "policy": {"name": "pearl+tiderl"},
                "run": {"steps": steps, "seed": seed},
            }
        )
    )


def test_stragglers_are_given_up_only_where_patience_has_an_end_and_are_counted() -> None:
    waits, hurries = straggling(0.0), straggling(0.01)
    assert waits.counts.dropped_trajectories == 0
    assert hurries.counts.dropped_trajectories > 0
    assert 0 < hurries.dropped_fraction < 0.5
    assert hurries.counts.lost_trajectories == 0
    assert hurries.elapsed_s < waits.elapsed_s
    assert max(step.staleness_max for step in hurries.steps) <= 1
    assert sum(step.trajectories for step in hurries.steps) == 96 - hurries.counts.dropped_trajectories


def test_a_group_goes_on_without_the_samples_that_it_would_wait_too_long_for() -> None:
    buffer = GroupBuffer(StalenessBound(max_staleness=1, batch=6), group_size=3, max_refills_per_group=1)
    for group in ("a", "b"):
        buffer.open(GroupId(group))
        for number in range(3):
            buffer.dispatch(GroupId(group), TrajectoryId(f"{group}{number}"), 0)
    for id_ in ("a0", "a1", "b0"):
        buffer.complete(sample(id_, id_[0]), 0)
    assert buffer.give_up_due(0) == []
    # A group of one sample says nothing about which is better: it waits on.
    assert buffer.give_up_due(1) == [(GroupId("a"), TrajectoryId("a2"))]
    assert (buffer.ready(), buffer.due(1)) == (1, 1)
    assert len(buffer.take(1, 1)) == 2
    assert (buffer.counts.dropped, buffer.counts.in_flight, buffer.counts.lost) == (1, 2, 0)


class OneFails:
    """Fails the first episode, and plays the others in no time."""

    def __init__(self) -> None:
        self.episodes = 0

    async def run(self, episode: Episode, generate: Generate) -> Trajectory:
        self.episodes += 1
        if self.episodes == 1:
            raise EnvironmentFailure("it is down")
        return sample(episode.trajectory, episode.group)


class Listener:
    def completed(self, trajectory: Trajectory) -> None: ...

    def dropped(self, complete: int) -> None: ...


def test_a_group_that_is_given_up_while_a_failed_sample_pauses_is_complete_without_it() -> None:
    agent = OneFails()

    async def play() -> GroupBuffer:
        buffer = GroupBuffer(StalenessBound(max_staleness=0, batch=3), group_size=3, max_refills_per_group=5)
        rollout = BatchRollout(
            router=Router(FakeGeneration()),
            agent=agent,
            tasks=NumberedTasks(),
            buffer=buffer,
            group_size=3,
            seed=0,
            version=lambda: 0,
            limits=RefillLimits(pause_s=10.0),
        )
        playing = asyncio.create_task(rollout.play(1, Listener()))
        await asyncio.sleep(1.0)
        rollout.give_up(buffer.give_up_due(0))
        await playing
        return buffer

    buffer = run_virtual(play())
    assert agent.episodes == 3
    assert buffer.ready() == 1
    assert (buffer.counts.failed, buffer.counts.buffered, buffer.counts.lost) == (1, 2, 0)


def sample(id_: str, group: str, version: int = 0) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(id_),
        group=GroupId(group),
        task="",
        turns=(),
        reward=0.0,
        dispatch_version=version,
        started_s=0.0,
        finished_s=0.0,
    )


def test_at_the_wall_limit_nothing_enters_any_more_and_what_is_under_way_is_trained_on() -> None:
    whole = run("pearl+tiderl", 3)
    cut = simulate(
        scenario_from(
            {
                "name": "small",
                "cluster": {"training_gpus": 4, "reserved_rollout_gpus": 8, "max_preemptible_gpus": 0},
                "availability": {"trace": "none"},
                "rollout": {"batch": 16, "group_size": 4, "max_staleness": 3},
                "workload": {"max_turns": 16, "max_context_tokens": 8192},
                "policy": {"name": "pearl+tiderl"},
                "run": {"duration_s": 0.5 * whole.steps[0].duration_s},
            }
        )
    )
    # Four batches were dispatched before the limit: all of them are used.
    assert len(cut.steps) == 4
    assert sum(step.trajectories for step in cut.steps) == 64 - cut.counts.dropped_trajectories
    assert cut.counts.lost_trajectories == 0


def test_old_groups_are_not_left_behind_young_ones_in_such_numbers_that_some_become_too_old() -> None:
    """Two groups an update and a bound of 2: of three that the next update must take, this one takes one."""
    buffer = GroupBuffer(StalenessBound(max_staleness=2, batch=4), group_size=2, max_refills_per_group=1)
    for group, version in (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 1)):
        buffer.open(GroupId(group))
        for number in range(2):
            buffer.dispatch(GroupId(group), TrajectoryId(f"{group}{number}"), version)
    for id_ in ("d0", "d1", "e0", "e1"):
        buffer.complete(sample(id_, id_[0], 1), 1)
    buffer.complete(sample("b0", "b"), 1)
    assert (buffer.ready(), buffer.due(1)) == (2, 1)
    buffer.complete(sample("b1", "b"), 1)
    assert (buffer.ready(), buffer.due(1)) == (3, 0)
    assert [used.trajectory.group for used in buffer.take(2, 1)] == ["b", "b", "d", "d"]


def test_after_a_cold_start_under_a_wide_bound_nothing_is_thrown_away_and_training_waits_for_no_refill() -> None:
    result = straggling(0.0, staleness=6, steps=9, seed=2)
    assert (result.counts.rejected_stale, result.counts.dropped_trajectories) == (0, 0)
    assert max(step.staleness_max for step in result.steps) == 6
    assert max(step.wait_grant_s for step in result.steps) < 60.0
