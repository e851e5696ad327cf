"""Carries Continuous Task Batching out: who may run a turn now, who waits, who is paused (TideRL section 4).

Keeps the tasks between the rounds of `pearl_planner.task_batching` and tells through two callbacks what a round came
to. Knows no clock and no event loop: the router's side is in `task_gate`, a simulation drives it by itself.

A round costs time in proportion to the tasks, so one is made only where something may come of it: a worker is over its
budget, or somebody waits and there may be room. A task that is paused while its turn runs ends that turn first: its
worker is over its budget for so long, and gets nobody new.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from pearl_planner.task_batching import (
    AdmissionLimits,
    BatchedTask,
    Footprints,
    PriorityWeights,
    schedule_round,
)
from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.worker import WorkerId


class TaskState(StrEnum):
    """Where a task is."""

    NEW = "new"
    """Never ran; waits in the queue."""
    ACTIVE = "active"
    """Has room on its worker, whether a turn runs or its environment works."""
    PAUSED = "paused"
    """Lost its room; its KV may be evicted."""


@dataclass(slots=True, eq=False)
class _Entry:
    task: BatchedTask
    state: TaskState = TaskState.NEW
    wants: bool = True
    """Whether it waits for a turn (its environment has answered)."""
    probes: bool = True
    """Whether its first turn is still to come."""
    told: bool = False
    """Whether `on_pause` was called and `on_resume` was not."""


@dataclass(slots=True, kw_only=True)
class BatchingCounts:
    """What happened since the beginning."""

    rounds: int = 0
    admitted: int = 0
    paused: int = 0
    resumed: int = 0
    moved: int = 0
    """Resumed on another worker than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBatchingSettings:
    """Sizes of task batching."""

    probe_tokens: int
    """Footprint assumed for a group's first task."""
    environment_slots: int = 1 << 30
    lookahead: int = 8
    max_passed_over: int = 32
    group_size: int = 1
    weights: PriorityWeights = field(default_factory=PriorityWeights)


class TaskBatcher:
    """Tasks by id. All calls are synchronous; callbacks come from inside them."""

    def __init__(
        self,
        settings: TaskBatchingSettings,
        *,
        on_run: Callable[[TrajectoryId, WorkerId], None],
        on_pause: Callable[[TrajectoryId], None] = lambda _task: None,
        on_resume: Callable[[TrajectoryId], None] = lambda _task: None,
        on_unfit: Callable[[TrajectoryId, int], None] = lambda _task, _tokens: None,
    ) -> None:
        """`on_run`: the turn that the task waits for may go to the worker. `on_pause`, `on_resume`: its environment's
        timeouts stop, and run again. `on_unfit`: it needs so many tokens, more than any worker's budget, and will never
        run; whoever waits for it should `end` it.
        """
        self._settings = settings
        self._on_run = on_run
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._on_unfit = on_unfit
        self._footprints = Footprints(settings.probe_tokens)
        self._entries: dict[TrajectoryId, _Entry] = {}
        self._active: dict[TrajectoryId, _Entry] = {}
        self._paused: dict[TrajectoryId, _Entry] = {}
        self._new: dict[TrajectoryId, _Entry] = {}
        self._budgets: dict[WorkerId, int] = {}
        self._usage: dict[WorkerId, int] = {}
        self._finished: dict[GroupId, int] = {}
        self._members: dict[GroupId, dict[TrajectoryId, _Entry]] = {}
        """Group → those of its tasks that are in hand."""
        self._asking: list[_Entry] = []
        self._in_round = self._again = self._moved = False
        """`_moved`: workers came or went since the newest pass, so that tasks may be on one that is gone."""
        self.counts = BatchingCounts()

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def usage_tokens(self) -> Mapping[WorkerId, int]:
        """Worker → tokens of its active tasks."""
        return self._usage

    @property
    def active(self) -> int:
        """Tasks that have room."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Tasks that wait for a turn."""
        return len(self._new) + sum(entry.wants for entry in self._paused.values())

    def state(self, task: TrajectoryId) -> TaskState:
        """Where a task is. Raises `KeyError` for one that is not in hand."""
        return self._entries[task].state

    # ---- what happens -----------------------------------------------------------------------------------------------

    def set_budgets(self, budgets: Mapping[WorkerId, int]) -> None:
        """These workers serve, with so many KV tokens each. Tasks of others move."""
        if budgets != self._budgets:
            self._budgets, self._moved = dict(budgets), True
            self._usage = dict.fromkeys(budgets, 0)
            for entry in self._active.values():
                if entry.task.worker in self._usage:
                    self._usage[entry.task.worker] += entry.task.footprint_tokens
        self._round()

    def add(self, task: TrajectoryId, group: GroupId, *, kind: str = "", evaluation: bool = False) -> None:
        """A new task wants its first turn."""
        made = BatchedTask(
            id=task,
            group=group,
            footprint_tokens=self._footprints.expected(group),
            kind=kind,
            evaluation=evaluation,
            group_finished=self._finished.get(group, 0),
            group_size=self._settings.group_size,
        )
        entry = self._entries[task] = self._new[task] = _Entry(made)
        self._members.setdefault(group, {})[task] = entry
        if len(self._new) <= self._settings.lookahead or evaluation:
            self._round()

    def turn(self, task: TrajectoryId, context_tokens: int, growth_tokens: int) -> None:
        """A task that ran before wants a turn: its prompt has `context_tokens`, and it may generate `growth_tokens`."""
        entry = self._entries[task]
        before = entry.task.footprint_tokens
        after = context_tokens + growth_tokens
        entry.task = replace(entry.task, footprint_tokens=after, context_tokens=context_tokens)
        entry.wants = True
        worker = entry.task.worker
        if entry.state is TaskState.ACTIVE and worker in self._usage:
            self._usage[worker] += after - before
            if self._usage[worker] <= self._budgets[worker]:
                self._run(entry)
                return
            self._asking.append(entry)
        elif entry.state is TaskState.PAUSED:
            self._wait(entry)
            if after > max((budget - self._usage[id_] for id_, budget in self._budgets.items()), default=0):
                return
        self._round()

    def turn_over(self, task: TrajectoryId, context_tokens: int) -> None:
        """A turn ended; the environment works, the KV stays. The first one of a group tells its footprint."""
        entry = self._entries[task]
        entry.wants = False
        worker = entry.task.worker
        if entry.state is TaskState.ACTIVE and worker in self._usage:
            self._usage[worker] += context_tokens - entry.task.footprint_tokens
        entry.task = replace(
            entry.task,
            footprint_tokens=context_tokens,
            context_tokens=context_tokens,
            executing=False,
            waits_since=None,
        )
        if entry.probes:
            entry.probes = False
            self._footprints.measured(entry.task.group, context_tokens)
        if self._overfull():
            self._round()
        else:
            self._round_where_room()

    def end(self, task: TrajectoryId, *, finished: bool = True) -> None:
        """A task is over (or, not `finished`, given up). No effect where it is not in hand."""
        entry = self._entries.pop(task, None)
        if entry is None:
            return
        self._active.pop(task, None)
        self._paused.pop(task, None)
        self._new.pop(task, None)
        group = entry.task.group
        members = self._members[group]
        del members[task]
        if not members:
            del self._members[group]
        if entry.state is TaskState.ACTIVE and entry.task.worker in self._usage:
            self._usage[entry.task.worker] -= entry.task.footprint_tokens
        if not finished:
            self._footprints.lost(task, group)
        else:
            if entry.probes:
                # Its only turn ended with it.
                self._footprints.measured(group, entry.task.footprint_tokens)
            self._finish(group)
        self._round_where_room()

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def _finish(self, group: GroupId) -> None:
        done = self._finished[group] = self._finished.get(group, 0) + 1
        if done >= self._settings.group_size:
            del self._finished[group]
            self._footprints.forget(group)
            return
        for entry in self._members.get(group, {}).values():
            entry.task = replace(entry.task, group_finished=done)

    def _overfull(self) -> bool:
        """Whether a worker is over its budget."""
        return any(self._usage[id_] > budget for id_, budget in self._budgets.items())

    def _round_where_room(self) -> None:
        """A round, where somebody waits who fits somewhere."""
        room = max((budget - self._usage[worker] for worker, budget in self._budgets.items()), default=0)
        if any(entry.wants and entry.task.footprint_tokens <= room for entry in self._paused.values()) or any(
            self._footprints.expected(entry.task.group) <= room for entry in self._head()
        ):
            self._round()

    def _head(self) -> Iterator[_Entry]:
        return islice(self._new.values(), self._settings.lookahead)

    def _round(self) -> None:
        """Passes of Algorithm 1 until one changes nothing. Callbacks may call back: such rounds follow, unnested."""
        self._again = True
        if self._in_round:
            return
        self._in_round = True
        try:
            while self._again:
                self._again = False
                self._again = self._once() or self._again
        finally:
            self._in_round = False

    def _once(self) -> bool:
        """A round. Returns whether it changed anything that lets another one do more."""
        self.counts.rounds += 1
        settings = self._settings
        waiting = [entry.task for entry in self._paused.values() if entry.wants]
        new = self._candidates()
        if not (waiting or new or self._asking or self._moved or self._overfull()):
            return False  # nobody to place and nobody to pause: a pass would look at every task for nothing
        self._moved = False
        made = schedule_round(
            budgets=self._budgets,
            active=[entry.task for entry in self._active.values()],
            paused=waiting,
            new=new,
            limits=AdmissionLimits(
                # Paused tasks whose environment works are not seen by the round, but keep their session.
                environment_slots=settings.environment_slots - (len(self._paused) - len(waiting)),
                lookahead=settings.lookahead,
                max_passed_over=settings.max_passed_over,
            ),
            weights=settings.weights,
            number=self.counts.rounds,
        )
        self._usage = dict(made.usage_tokens)
        for id_ in made.pause:
            self._pause(self._entries[id_])
        running = [self._resume(self._entries[id_], worker) for id_, worker in made.resume]
        running += [self._admit(self._entries[id_], worker) for id_, worker in made.admit]
        running += self._asking
        self._asking = []
        for entry in (self._entries[id_] for id_ in made.pause):
            if entry.state is TaskState.PAUSED:
                entry.told = True
                self._on_pause(entry.task.id)
                self._wait(entry)
        for entry in running:
            if entry.wants and entry.state is TaskState.ACTIVE:
                self._run(entry)
        for id_ in sorted(made.unfit & self._entries.keys()):
            self._on_unfit(id_, self._entries[id_].task.footprint_tokens)
        # Admission moved the head of the queue on: there may be room for who came behind it.
        return bool(made.admit)

    def _candidates(self) -> list[BatchedTask]:
        """The head of the queue: as many as a round may look at, less those that wait for their group's probe."""
        found: list[BatchedTask] = []
        probes: set[GroupId] = set()
        for entry in self._new.values():
            task = entry.task
            if task.group in probes or not self._footprints.may_start(task.id, task.group):
                continue
            if not self._footprints.known(task.group):
                probes.add(task.group)
            expected = self._footprints.expected(task.group)
            if expected != task.footprint_tokens:
                entry.task = task = replace(task, footprint_tokens=expected)
            found.append(entry.task if found else self._wait(entry))
            if len(found) >= 2 * self._settings.lookahead:
                break
        return found

    def _wait(self, entry: _Entry) -> BatchedTask:
        """Note since when a task waits for room."""
        if entry.wants and entry.task.waits_since is None:
            entry.task = replace(entry.task, waits_since=self.counts.rounds)
        return entry.task

    def _pause(self, entry: _Entry) -> None:
        del self._active[entry.task.id]
        self._paused[entry.task.id] = entry
        entry.state = TaskState.PAUSED
        self.counts.paused += 1

    def _resume(self, entry: _Entry, worker: WorkerId) -> _Entry:
        self.counts.resumed += 1
        self.counts.moved += worker != entry.task.worker
        del self._paused[entry.task.id]
        self._activate(entry, worker)
        if entry.told:
            entry.told = False
            self._on_resume(entry.task.id)
        return entry

    def _admit(self, entry: _Entry, worker: WorkerId) -> _Entry:
        self.counts.admitted += 1
        del self._new[entry.task.id]
        self._activate(entry, worker)
        self._footprints.started(entry.task.id, entry.task.group)
        return entry

    def _activate(self, entry: _Entry, worker: WorkerId) -> None:
        entry.state = TaskState.ACTIVE
        entry.task = replace(entry.task, worker=worker)
        self._active[entry.task.id] = entry

    def _run(self, entry: _Entry) -> None:
        entry.wants = False
        entry.task = replace(entry.task, executing=True)
        worker = entry.task.worker
        assert worker is not None
        self._on_run(entry.task.id, worker)
