"""Batches without torch: advantages, ages, and how work is spread over ranks."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl_rl.training.batch import BatchError, StalenessError, TrainBatch, group_advantages, plan_update
from pearl_rl.training.options import (
    Aggregation,
    Baseline,
    LossOptions,
    OptimizerOptions,
    OptionError,
    TrainerOptions,
)
from pearl_state.trajectory import GroupId, Trajectory, TrajectoryId, Turn, WeightSpan


def trajectory(number=0, group="g0", reward=1.0, turns=((3, 2),), dispatch=0, version=None):
    made = tuple(
        Turn(
            prompt=range(prompt),
            response=range(10, 10 + response),
            logprobs=[-0.5] * response,
            spans=(WeightSpan(dispatch if version is None else version, response),),
        )
        for prompt, response in turns
    )
    return Trajectory(
        id=TrajectoryId(f"t{number:08d}"),
        group=GroupId(group),
        task="task",
        turns=made,
        reward=reward,
        dispatch_version=dispatch,
        started_s=0.0,
        finished_s=1.0,
    )


def test_advantages_are_the_reward_against_the_group_in_standard_deviations():
    rewards = [(GroupId("a"), 1.0), (GroupId("b"), 5.0), (GroupId("a"), 0.0), (GroupId("a"), 0.5), (GroupId("b"), 5.0)]
    std = math.sqrt((0.25 + 0.25) / 3)
    assert group_advantages(rewards, Baseline.MEAN_STD) == pytest.approx([0.5 / std, 0, -0.5 / std, 0, 0], abs=1e-5)
    assert group_advantages(rewards, Baseline.MEAN) == [0.5, 0.0, -0.5, 0.0, 0.0]
    assert group_advantages(rewards, Baseline.NONE) == [1.0, 5.0, 0.0, 0.5, 5.0]


@pytest.mark.parametrize("baseline", [Baseline.MEAN_STD, Baseline.MEAN])
def test_a_group_of_one_and_a_group_of_equal_rewards_teach_nothing(baseline):
    rewards = [(GroupId("alone"), 0.7), (GroupId("equal"), 0.3), (GroupId("equal"), 0.3)]
    assert group_advantages(rewards, baseline) == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100)), min_size=1, max_size=30))
def test_group_advantages_add_up_to_nothing_and_are_bounded(rewards):
    named = [(GroupId(str(group)), reward) for group, reward in rewards]
    for group in {group for group, _ in named}:
        advantages = [
            a for (g, _), a in zip(named, group_advantages(named, Baseline.MEAN_STD), strict=True) if g == group
        ]
        assert sum(advantages) == pytest.approx(0, abs=1e-6)
        assert max(map(abs, advantages)) <= math.sqrt(len(advantages)) + 1e-9


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(BatchError, match=r"reward .* group g0 is nan; rewards must be finite"):
        TrainBatch.build([trajectory(reward=math.nan)], 0)


def test_a_row_holds_all_turns_with_loss_on_generated_tokens_only():
    (row,) = TrainBatch.build([trajectory(turns=((3, 2), (2, 1)))], 0).sequences
    assert row.tokens == (0, 1, 2, 10, 11, 0, 1, 10)
    assert row.mask == (False, False, False, True, True, False, False, True)
    assert row.logprobs == (0.0, 0.0, 0.0, -0.5, -0.5, 0.0, 0.0, -0.5)


def test_staleness_is_counted_from_dispatch_to_use():
    """rllm#622: dispatched at 3, finished at 5, used at 7 is 4 old, whatever its tokens say."""
    late = trajectory(dispatch=3, version=5)
    with pytest.raises(
        StalenessError, match=r"t00000000 was dispatched at version 3 .* staleness 4 exceeds the bound 3"
    ):
        TrainBatch.build([late], 7, max_staleness=3)
    batch = TrainBatch.build([late, trajectory(1, dispatch=7)], 7, max_staleness=4)
    assert (batch.staleness_max, batch.staleness_mean, batch.token_age_mean) == (4, 2.0, 1.0)


@pytest.mark.parametrize("versions", [{"dispatch": 3}, {"dispatch": 0, "version": 3}])
def test_a_trajectory_from_a_version_that_the_trainer_has_not_reached_is_an_error_not_a_negative_age(versions):
    """radixark/miles#2835: after a resume a sample of version 3 met a trainer that said 1."""
    with pytest.raises(StalenessError, match="version 3, the trainer is at 1: versions went back"):
        TrainBatch.build([trajectory(**versions)], 1)


def test_parts_that_do_not_fit_together_are_refused():
    turn = Turn(prompt=[1], response=[2, 3], logprobs=[-1.0], spans=(WeightSpan(0, 2),))
    base = trajectory()
    broken = [
        ([turn], "turn 0 of trajectory t00000000 has 2 response tokens and 1 log-probabilities"),
        ([Turn(prompt=[1], response=[2], logprobs=[math.nan], spans=())], "log-probability that is not finite"),
        ([Turn(prompt=[], response=[2], logprobs=[-1.0], spans=())], "begins with a generated token"),
    ]
    for turns, message in broken:
        bad = replace(base, turns=tuple(turns))
        with pytest.raises(BatchError, match=message):
            TrainBatch.build([bad], 0)
    with pytest.raises(BatchError, match="at least one trajectory"):
        TrainBatch.build([], 0)


def batch_of(rows):
    """Rows of (group, prompt tokens, response tokens)."""
    return TrainBatch.build(
        [
            trajectory(n, f"g{group}", float(n), ((prompt, response),))
            for n, (group, prompt, response) in enumerate(rows)
        ],
        version=0,
    )


rows = st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(0, 20))
batches = st.lists(rows, min_size=1, max_size=40).map(batch_of)


@given(batches, st.integers(1, 5), st.integers(1, 4), st.integers(1, 200), st.sampled_from(Aggregation))
def test_a_plan_trains_every_row_once_and_keeps_ranks_in_step(batch, ranks, minibatches, limit, aggregation):
    plan = plan_update(batch, ranks, minibatches, limit, aggregation)
    rows = [row for step in plan for rank in step.ranks for micro in rank for row in micro.rows]
    assert sorted(rows) == list(range(len(batch.sequences)))
    groups = {sequence.group for sequence in batch.sequences}
    assert len(plan) == min(minibatches, len(groups))
    for step in plan:
        assert len(step.ranks) == ranks
        assert len({len(rank) for rank in step.ranks}) == 1
        mine = {batch.sequences[row].group for rank in step.ranks for micro in rank for row in micro.rows}
        others = [row for row in rows if row not in {r for rank in step.ranks for micro in rank for r in micro.rows}]
        assert not mine & {batch.sequences[row].group for row in others}


@given(batches, st.integers(1, 5), st.integers(1, 200), st.sampled_from(Aggregation))
def test_micro_batches_stay_within_the_padded_limit_and_ranks_differ_by_at_most_one_row(
    batch, ranks, limit, aggregation
):
    (step,) = plan_update(batch, ranks, 1, limit, aggregation)
    length = [len(sequence.tokens) for sequence in batch.sequences]
    loads = []
    for rank in step.ranks:
        loads.append(sum(length[row] for micro in rank for row in micro.rows))
        for micro in rank:
            padded = len(micro.rows) * max((length[row] for row in micro.rows), default=0)
            assert padded <= limit or len(micro.rows) == 1
    assert max(loads) - min(loads) <= max(length)


@given(batches, st.sampled_from(Aggregation))
def test_weights_of_all_generated_tokens_add_up_to_one(batch, aggregation):
    (step,) = plan_update(batch, 2, 1, 100, aggregation)
    total = sum(weight * batch.sequences[row].response_tokens for row, weight in step.row_weights)
    assert total == pytest.approx(1.0 if batch.response_tokens else 0.0)


def test_token_mean_weighs_tokens_and_sequence_mean_weighs_trajectories():
    rows = [trajectory(0, turns=((1, 4),)), trajectory(1, turns=((1, 1),)), trajectory(2, turns=((1, 0),))]
    batch = TrainBatch.build(rows, 0)
    (by_token,) = plan_update(batch, 1, 1, 100, Aggregation.TOKEN_MEAN)
    assert dict(by_token.row_weights) == {0: 0.2, 1: 0.2, 2: 0.0}
    (by_sequence,) = plan_update(batch, 1, 1, 100, Aggregation.SEQUENCE_MEAN)
    assert dict(by_sequence.row_weights) == {0: 0.125, 1: 0.5, 2: 0.0}


def test_options_travel_as_json_and_refuse_values_out_of_range():
    options = TrainerOptions(
        loss=LossOptions(baseline=Baseline.MEAN, clip_low=0.2, clip_high=0.3),
        optimizer=OptimizerOptions(warmup_updates=4),
    )
    assert TrainerOptions.from_json(options.to_json()) == options
    assert [options.optimizer.learning_rate_at(step) for step in (0, 1, 3, 4, 9)] == [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]
    with pytest.raises(OptionError, match="learning_rate is -1; it must be at least 0"):
        OptimizerOptions(learning_rate=-1)
    with pytest.raises(OptionError, match="truncation is nan"):
        LossOptions(truncation=math.nan)
    with pytest.raises(OptionError, match="clip_low and clip_high must be set together"):
        LossOptions(clip_low=0.2)


def test_the_control_plane_side_of_training_imports_no_torch():
    modules = "batch, build, checkpoint, options, process, rank_group, results, shards, tiny_model"
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys; from pearl_rl.training import {modules}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
