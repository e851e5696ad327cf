"""Continuous Task Batching: which multi-turn tasks keep their KV on a worker, as TideRL section 4 and Algorithm 1.

An engine batches requests and forgets a task's KV whenever the task waits for its environment. Here the unit is the
task: it is admitted where its footprint fits the worker's token budget, keeps its room while the environment works,
and is paused as a whole, by priority, before the engine would have to evict. One call of `schedule_round` is one pass
of Algorithm 1 over all workers. Pure: the caller measures footprints and carries the round out.

Two additions keep it free of starvation. A task that waited for `max_passed_over` rounds is *due*: it comes before
everything else, a worker's headroom is kept for it until it fits, and it is paused last until its next turn is over.
And diversity reorders new tasks only within a short look-ahead.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.worker import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityWeights:
    """ω1 … ω4 of TideRL's priority score. The defaults make the terms strict tiers for groups of up to 170 tasks.

    One finished group member more outweighs the two terms below it as long as completion / group size exceeds
    executing + context; see `strict_for`.
    """

    evaluation: float = 1024.0
    """ω1, for an evaluation task: it holds the next weight synchronisation back."""
    completion: float = 512.0
    """ω2, times the finished part of the task's group: a fragmented group trains nobody."""
    executing: float = 2.0
    """ω3, for a task whose request is on the engine: pausing it wastes cycles."""
    context: float = 1.0
    """ω4, times context / `context_scale_tokens`: a long context is dear to prefill again."""
    context_scale_tokens: int = 32_768
    """Context at which the last term is as large as it gets."""

    def strict_for(self, group_size: int) -> bool:
        """Whether the four terms are strict tiers (Table 1) for groups of this size."""
        below = self.executing + self.context
        step = self.completion / group_size
        return self.executing > self.context and step > below and self.evaluation >= self.completion + below


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedTask:
    """One trajectory as the scheduler sees it."""

    id: TrajectoryId
    group: GroupId
    footprint_tokens: int
    """KV tokens that it occupies or would occupy: measured at the start of each turn; for a new one its group's
    probed first turn."""
    context_tokens: int = 0
    """Its context now; 0 where it has not begun."""
    evaluation: bool = False
    kind: str = ""
    """Type of the task, for diversity."""
    group_finished: int = 0
    group_size: int = 1
    executing: bool = False
    """Whether a request of it is on the engine now (else its environment works, or it waits)."""
    worker: WorkerId | None = None
    """Where it is active, or was last."""
    waits_since: int | None = None
    """Round in which it first wanted room and got none since its last turn; of new tasks only the head of the queue
    waits. None: it does not."""

    @property
    def completion(self) -> float:
        """Finished part of its group."""
        return self.group_finished / self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What bounds admission beside the token budgets (TideRL section 4.1). Evaluation tasks train nobody: the
    staleness allowance does not count them.
    """

    environment_slots: int = 1 << 30
    """Tasks that the environments bear at once. A paused task keeps its session, so it counts."""
    staleness_allowance: int = 1 << 30
    """Training tasks that may be dispatched now without breaking the staleness bound."""
    lookahead: int = 8
    """New tasks among which the one whose kind is rarest on the worker is taken; 1 keeps their order."""
    max_passed_over: int = 32
    """Rounds of waiting after which a task is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingRound:
    """What one round decides. Carry it out in this order: pause, resume, admit."""

    pause: tuple[TrajectoryId, ...] = ()
    resume: tuple[tuple[TrajectoryId, WorkerId], ...] = ()
    admit: tuple[tuple[TrajectoryId, WorkerId], ...] = ()
    usage_tokens: Mapping[WorkerId, int] = field(default_factory=dict[WorkerId, int])
    """Worker → tokens of its active tasks once the round is carried out; never above its budget."""
    unfit: frozenset[TrajectoryId] = frozenset()
    """Tasks whose footprint exceeds every budget: no round will ever place them."""


def priority(task: BatchedTask, weights: PriorityWeights) -> float:
    """P(t) = ω1·I_eval + ω2·G_completion + ω3·I_active + ω4·L_context (TideRL section 4.2)."""
    length = min(1.0, task.context_tokens / weights.context_scale_tokens)
    return (
        weights.evaluation * task.evaluation
        + weights.completion * task.completion
        + weights.executing * task.executing
        + weights.context * length
    )


class Footprints:
    """What groups' first turns took, and what a task is expected to take: probing (TideRL section 4.1).

    The first task of a group that is dispatched is its probe; the others wait for its first turn.
    """

    def __init__(self, default_tokens: int) -> None:
        """`default_tokens`: footprint of a probe, before anything is known about its group."""
        self._default = default_tokens
        self._probed: dict[GroupId, int] = {}
        self._probing: dict[GroupId, TrajectoryId] = {}

    def expected(self, group: GroupId) -> int:
        """Tokens that a new task of the group will take."""
        return self._probed.get(group, self._default)

    def known(self, group: GroupId) -> bool:
        """Whether the group was probed."""
        return group in self._probed

    def may_start(self, task: TrajectoryId, group: GroupId) -> bool:
        """Whether a new task may be admitted now: its group is probed, or nobody probes it yet."""
        return group in self._probed or self._probing.get(group, task) == task

    def started(self, task: TrajectoryId, group: GroupId) -> None:
        """A task was admitted; the first of a group becomes its probe."""
        if group not in self._probed:
            self._probing.setdefault(group, task)

    def measured(self, group: GroupId, tokens: int) -> None:
        """The first turn of a task of the group took `tokens`. Later ones change the estimate only upwards."""
        self._probed[group] = max(tokens, self._probed.get(group, 0))
        self._probing.pop(group, None)

    def lost(self, task: TrajectoryId, group: GroupId) -> None:
        """A task ended without a first turn: where it was the probe, another one may be."""
        if self._probing.get(group) == task:
            del self._probing[group]

    def forget(self, group: GroupId) -> None:
        """The group is over."""
        self._probed.pop(group, None)
        self._probing.pop(group, None)


@dataclass(slots=True)
class _Rank:
    """A worker while a round is made."""

    id: WorkerId
    budget: int
    tasks: list[BatchedTask] = field(default_factory=list[BatchedTask])
    usage: int = 0
    closed: bool = False
    """Its headroom is kept for a due task."""

    @property
    def headroom(self) -> int:
        return self.budget - self.usage

    def fits(self, task: BatchedTask) -> bool:
        return self.usage + task.footprint_tokens <= self.budget

    def add(self, task: BatchedTask) -> None:
        self.tasks.append(task)
        self.usage += task.footprint_tokens

    def members(self, group: GroupId) -> int:
        return sum(task.group == group for task in self.tasks)

    def kinds(self) -> Counter[str]:
        return Counter(task.kind for task in self.tasks)


def schedule_round(
    *,
    budgets: Mapping[WorkerId, int],
    active: Iterable[BatchedTask],
    paused: Sequence[BatchedTask] = (),
    new: Sequence[BatchedTask] = (),
    limits: AdmissionLimits | None = None,
    weights: PriorityWeights | None = None,
    number: int = 0,
) -> BatchingRound:
    """One pass of Algorithm 1: pause what overflows, then resume before admitting. `number` counts rounds.

    `active` tasks name their worker; one whose worker has no budget any more is paused. `new` comes in the order of
    its queue. Afterwards no worker's usage exceeds its budget, and a task is in at most one of the three lists (one
    that was paused may go on elsewhere at once: it is in `pause` and in `resume`).
    """
    limits = limits or AdmissionLimits()
    weights = weights or PriorityWeights()
    ranks = {id_: _Rank(id_, budget) for id_, budget in sorted(budgets.items())}
    evicted: list[BatchedTask] = []
    for task in active:
        rank = ranks.get(task.worker) if task.worker is not None else None
        if rank is None:
            evicted.append(task)
        else:
            rank.add(task)
    oldest = number - limits.max_passed_over
    for rank in ranks.values():
        if rank.usage > rank.budget:
            evicted.extend(_overflow(rank, oldest, weights))
    # What was just paused may go on elsewhere at once: a closed worker's tasks move (section 5.2, task migration).
    waiting = [replace(task, executing=False) for task in evicted] + list(paused)
    resumed = _resume(ranks, waiting, {task.id for task in evicted}, oldest, weights)
    open_tasks = sum(len(rank.tasks) for rank in ranks.values()) + len(waiting) - len(resumed)
    largest = max(budgets.values(), default=0)
    return BatchingRound(
        pause=tuple(task.id for task in evicted),
        resume=tuple(resumed),
        admit=tuple(_admit(ranks, new, open_tasks, oldest, limits)),
        usage_tokens={id_: rank.usage for id_, rank in ranks.items()},
        unfit=frozenset(task.id for task in (*waiting, *new) if task.footprint_tokens > largest > 0),
    )


def _due(task: BatchedTask, oldest: int) -> bool:
    return task.waits_since is not None and task.waits_since <= oldest


def _overflow(rank: _Rank, oldest: int, weights: PriorityWeights) -> list[BatchedTask]:
    """Take the tasks of lowest priority off a worker until its budget holds; due ones go last."""
    evicted: dict[TrajectoryId, BatchedTask] = {}
    for task in sorted(rank.tasks, key=lambda t: (_due(t, oldest), priority(t, weights), t.id)):
        if rank.usage <= rank.budget:
            break
        evicted[task.id] = task
        rank.usage -= task.footprint_tokens
    rank.tasks = [task for task in rank.tasks if task.id not in evicted]
    return list(evicted.values())


def _resume(
    ranks: Mapping[WorkerId, _Rank],
    waiting: Sequence[BatchedTask],
    evicted: set[TrajectoryId],
    oldest: int,
    weights: PriorityWeights,
) -> list[tuple[TrajectoryId, WorkerId]]:
    """Place paused tasks, the highest priority first, each where its prefix or its group's is."""
    room = max((rank.headroom for rank in ranks.values()), default=0)
    chance = [task for task in waiting if task.footprint_tokens <= room or _due(task, oldest)]
    resumed: list[tuple[TrajectoryId, WorkerId]] = []
    for task in sorted(chance, key=lambda t: (not _due(t, oldest), -priority(t, weights), t.id)):
        open_ranks = [rank for rank in ranks.values() if not rank.closed]
        if task.id in evicted and task.worker in ranks:
            # It overflowed its worker in this very round: only another one may take it, or it would bounce.
            open_ranks = [rank for rank in open_ranks if rank.id != task.worker]
        fitting = [rank for rank in open_ranks if rank.fits(task)]
        if fitting:
            rank = fitting[0] if len(fitting) == 1 else min(fitting, key=lambda r: _affinity(r, task))
            rank.add(replace(task, worker=rank.id))
            resumed.append((task.id, rank.id))
        elif _due(task, oldest) and task.id not in evicted:
            able = [rank for rank in open_ranks if rank.budget >= task.footprint_tokens]
            if able:
                max(able, key=lambda r: (r.headroom, -r.id)).closed = True
    return resumed


def _affinity(rank: _Rank, task: BatchedTask) -> tuple[bool, int, float, WorkerId]:
    """Smaller is better: its own worker, then the one with most of its group, then the emptiest."""
    return (rank.id != task.worker, -rank.members(task.group), rank.usage / rank.budget, rank.id)


def _admit(
    ranks: Mapping[WorkerId, _Rank],
    new: Sequence[BatchedTask],
    open_tasks: int,
    oldest: int,
    limits: AdmissionLimits,
) -> Iterator[tuple[TrajectoryId, WorkerId]]:
    """Admit new tasks within the three constraints, each on the worker with the most headroom."""
    slots = limits.environment_slots - open_tasks
    allowance = limits.staleness_allowance
    queue = list(new)
    open_ranks = [rank for rank in ranks.values() if not rank.closed]
    while queue and slots > 0 and open_ranks:
        rank = max(open_ranks, key=lambda r: (r.headroom, -r.id))
        window = [t for t in queue[: limits.lookahead] if t.evaluation or allowance > 0]
        if not window:
            # Training tasks fill the window and may not go: evaluation behind them must not wait for them.
            window = [task for task in queue if task.evaluation][:1]
        due = [task for task in window if _due(task, oldest)]
        fitting = [task for task in (due or window) if rank.fits(task)]
        if not fitting:
            return
        chosen = _rarest(rank, fitting)
        queue.remove(chosen)
        rank.add(replace(chosen, worker=rank.id))
        yield chosen.id, rank.id
        slots -= 1
        allowance -= not chosen.evaluation


def _rarest(rank: _Rank, fitting: Sequence[BatchedTask]) -> BatchedTask:
    """Evaluation first, then the kind of which the worker has fewest, then the order of the queue."""
    if len({(task.evaluation, task.kind) for task in fitting}) == 1:
        return fitting[0]
    kinds = rank.kinds()
    return min(enumerate(fitting), key=lambda e: (not e[1].evaluation, kinds[e[1].kind], e[0]))[1]
