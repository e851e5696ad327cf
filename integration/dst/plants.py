"""Bugs planted by hand, one at a time: each is a plausible mistake in one function, and the explorer must catch it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pearl_executor.rebuilder import ClusterRebuilder
from pearl_executor.toggle import ToggleManager
from pearl_executor.weight_sync import WeightSync
from pearl_executor.workers import BoundedWorkers
from pearl_planner import answers, inter_scale, intra_scale, reconcile, step
from pearl_rl.checkpoints import CheckpointWriter
from pearl_rl.journal import run_journal
from pearl_rl.journal.run_journal import RunJournal
from pearl_rl.rollout.attempt import Attempt
from pearl_rl.rollout.buffer import GroupBuffer
from pearl_rl.rollout.evaluation import AnchoredEvaluation
from pearl_rl.rollout.ledger import RolloutLedger
from pearl_rl.rollout.pipeline import PipelineScheduler
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.task_batcher import TaskBatcher
from pearl_rl.training.rank_group import TrainerLostError
from pearl_state import events
from pearl_state.effects import GrantTraining, ReturnGpus
from pearl_state.lifecycle import Lifecycle
from pearl_state.table import WorkerTable

Put = Callable[[Any, str, Any], None]
"""`monkeypatch.setattr`."""


def router_one_table_late(put: Put) -> None:
    """The router follows each table only when the next one comes."""
    apply = Router.apply

    def late(self, table):
        before, self.late_table = getattr(self, "late_table", table), table
        apply(self, before)

    put(Router, "apply", late)


def answers_of_old_plans_count(put: Put) -> None:
    """A stage's answer is taken for the plan under way, whichever plan it is of."""
    applied = answers.stage_applied

    def confused(state, event):
        if state.running is not None and event.plan_id not in state.removals:
            event = replace(event, plan_id=state.running.plan.id, stage=state.running.stage)
        return applied(state, event)

    put(step, "_HANDLERS", {**step._HANDLERS, events.StageApplied: confused})


def releases_are_believed(put: Put) -> None:
    """Whatever a release gives back is enough."""
    put(BoundedWorkers, "required_bytes", lambda self, held_bytes: 0)


def leavers_are_not_ended(put: Put) -> None:
    """A worker on dedicated GPUs is said to have left while its process lives on."""

    async def leave(self, worker, deadline_s):
        return None

    put(ClusterRebuilder, "leave", leave)


def cleaned_without_a_kill(put: Put) -> None:
    """Failed workers are said to be cleaned, and nobody kills them."""

    async def claim(self, worker):
        self.processes.forget(worker)

    put(BoundedWorkers, "kill_until_confirmed", claim)


def training_is_granted_at_once(put: Put) -> None:
    """Training may run although it gave its memory away."""

    def grant(state):
        if not state.training_wanted or state.training_running:
            return state, ()
        return replace(state, training_running=True), (GrantTraining(),)

    put(step, "return_training", grant)


def orphans_keep_serving(put: Put) -> None:
    """Prefill workers go on without decode workers, and the reverse."""

    def withdraw(table, ids, to):
        moved = [replace(table.rows[id_], lifecycle=to) for id_ in sorted(ids)]
        return table.update(moved), frozenset()

    for module in (reconcile, answers):
        put(module, "withdraw", withdraw)


def weights_are_promised(put: Put) -> None:
    """A worker is said to hold the newest weights; nobody loads them."""

    async def bring(self, worker, version, limit_s):
        return max(version, self._source.newest().version)

    put(WeightSync, "bring", bring)


def partial_tokens_come_twice(put: Put) -> None:
    """The last chunk of an interrupted attempt is kept twice."""
    collected = Attempt.collected

    def twice(self):
        if self.chunks and len(self.chunks) < self.request.max_new_tokens:
            self.chunks.append(self.chunks[-1])
        return collected(self)

    put(Attempt, "collected", twice)


def failed_samples_stay_in_flight(put: Put) -> None:
    """A sample that the infrastructure failed is not taken off the count."""
    failed = GroupBuffer.failed

    def forgetful(self, group, trajectory, cause):
        self.counts.in_flight += 1
        return failed(self, group, trajectory, cause)

    put(GroupBuffer, "failed", forgetful)


def groups_are_used_again(put: Put) -> None:
    """A group stays in the buffer after it was trained on."""
    take = GroupBuffer.take

    def greedy(self, groups, version):
        kept = dict(self._groups)
        samples = take(self, groups, version)
        self._groups = kept
        return samples

    put(GroupBuffer, "take", greedy)


def nobody_wakes_the_rollout(put: Put) -> None:
    """New weights do not wake a rollout that waits for the staleness bound."""
    put(PipelineScheduler, "_wake", lambda self: None)


def cancelled_borrows_are_left_behind(put: Put) -> None:
    """A borrow that is given up leaves its processes on the GPUs."""

    async def forget(self, worker, at_fault):
        return None

    put(ToggleManager, "_roll_back", forget)


def gpus_are_given_back_early(put: Put) -> None:
    """The provider is told that GPUs are empty while the worker on them still drains."""
    reclaimed = inter_scale.reclaimed

    def hasty(state, event):
        state, effects = reclaimed(state, event)
        held = frozenset(
            gpu for id_ in state.doomed for gpu in state.table.rows[id_].gpus if state.table.rows[id_].holds_gpu
        )
        return state, (*effects, ReturnGpus(gpus=held)) if held else effects

    put(step, "_HANDLERS", {**step._HANDLERS, events.GpusReclaimed: hasty})


def crashes_are_ignored(put: Put) -> None:
    """A worker that is lost stays in the table as it was."""
    put(step, "_HANDLERS", {**step._HANDLERS, events.WorkerFailed: lambda state, event: (state, ())})


def failed_groups_stay_starting(put: Put) -> None:
    """A failed preparation is forgotten, but its workers are not settled."""

    def forget(state, event):
        groups = {id_: g for id_, g in state.groups.items() if id_ != event.plan_id}
        return replace(state, groups=groups), ()

    put(step, "_HANDLERS", {**step._HANDLERS, events.GroupFailed: forget})


def training_counts_as_resumed(put: Put) -> None:
    """A failed resume of training is taken for a success."""

    def resumed(state, event):
        resuming = state.table.where(Lifecycle.RESUMING, role=intra_scale.Role.TRAINING)
        return replace(state, table=state.table.move(resuming, Lifecycle.ACTIVE)), ()

    put(step, "_HANDLERS", {**step._HANDLERS, events.TrainingResumed: resumed})


def events_are_applied_but_not_journalled(put: Put) -> None:
    """The control plane applies events that its journal does not have."""
    append = RunJournal.append

    def forgetful(self, event, loads):
        if not isinstance(event, events.GpusOffered | events.StageApplied):
            append(self, event, loads)

    put(RunJournal, "append", forgetful)


def lost_updates_are_not_undone(put: Put) -> None:
    """Groups that a lost update was given are not trained on again."""
    resume = RolloutLedger._resume

    def forget(self, record):
        self.taken.clear()
        resume(self, record)

    put(RolloutLedger, "_resume", forget)


def completions_are_forgotten(put: Put) -> None:
    """A resumed run plays again what was complete, and keeps both."""
    restore = GroupBuffer.restore

    def twice(self, groups, counts):
        restore(self, groups, counts)
        for group in groups.values():
            group.complete = []

    put(GroupBuffer, "restore", twice)


def the_next_weights_wait_for_no_evaluation(put: Put) -> None:
    """New weights are published in the middle of an evaluation."""

    async def settle(self):
        return None

    put(AnchoredEvaluation, "settle", settle)


def ended_tasks_keep_their_room(put: Put) -> None:
    """The room that a task had for its context is never given back."""
    put(TaskBatcher, "end", lambda self, task, *, finished: None)


def half_written_checkpoints_count(put: Put) -> None:
    """A checkpoint that a lost rank cut short is taken for a whole one."""
    complete = CheckpointWriter._complete

    async def believe(self, saving, target, record):
        await asyncio.wait({saving})
        done = asyncio.get_running_loop().create_future()
        done.set_result(saving.cancelled() or saving.exception())
        await complete(self, done, target, record)

    put(CheckpointWriter, "_complete", believe)


def a_lost_checkpoint_is_the_last(put: Put) -> None:
    """Where a rank was lost while it wrote a checkpoint, no other one is written."""
    begin = CheckpointWriter._begin

    async def once(self, step, position):
        if getattr(self, "lost", False):
            return
        try:
            await begin(self, step, position)
        except TrainerLostError:
            self.lost = True

    put(CheckpointWriter, "_begin", once)


def learned_costs_are_forgotten(put: Put) -> None:
    """A resumed run begins anew to learn what switches cost."""
    decode = run_journal.decode_state

    def forgetful(data, settings):
        data.pop("switch_costs")
        return decode(data, settings)

    put(run_journal, "decode_state", forgetful)


def whoever_stands_by_is_admitted(put: Put) -> None:
    """A worker serves with whatever weights it holds."""
    put(WorkerTable, "up_to_date", lambda self, version: version is not None)


def who_joins_late_is_left_behind(put: Put) -> None:
    """Weights that were published while a worker joined never reach it."""
    put(answers, "_catch_up", lambda state, admitted: ())


PLANTS: tuple[Callable[[Put], None], ...] = (
    router_one_table_late,
    answers_of_old_plans_count,
    releases_are_believed,
    leavers_are_not_ended,
    cleaned_without_a_kill,
    training_is_granted_at_once,
    orphans_keep_serving,
    weights_are_promised,
    partial_tokens_come_twice,
    failed_samples_stay_in_flight,
    groups_are_used_again,
    nobody_wakes_the_rollout,
    cancelled_borrows_are_left_behind,
    gpus_are_given_back_early,
    crashes_are_ignored,
    failed_groups_stay_starting,
    training_counts_as_resumed,
    events_are_applied_but_not_journalled,
    lost_updates_are_not_undone,
    completions_are_forgotten,
    the_next_weights_wait_for_no_evaluation,
    ended_tasks_keep_their_room,
    half_written_checkpoints_count,
    a_lost_checkpoint_is_the_last,
    learned_costs_are_forgotten,
    whoever_stands_by_is_admitted,
    who_joins_late_is_left_behind,
)
