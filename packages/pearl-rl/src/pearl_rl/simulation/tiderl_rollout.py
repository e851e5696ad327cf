"""Rollout of multi-turn tasks on simulated engines, batched by request (fixed concurrency) or by task (TideRL's CTB).

The engines are those of `engine.py`, driven by one heap of events. Tasks may be added at any time, workers come and go
between events, and weights may change: a training loop can be driven on top (`tiderl_steps`).
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pearl_rl.rollout.task_batcher import TaskBatcher, TaskBatchingSettings
from pearl_rl.simulation.batch_run import WorkerModel
from pearl_rl.simulation.engine import Engine
from pearl_rl.simulation.requests import ANY_PREFIX, EngineRequest, Outcome
from pearl_rl.simulation.workload import Script
from pearl_state.roles import Role
from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.worker import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatching:
    """Tasks are dispatched first come, first served, up to a fixed number at a time on each worker."""

    concurrency: int
    """Tasks on one worker, whether a request of theirs runs or their environment works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatching:
    """Continuous task batching."""

    settings: TaskBatchingSettings
    budget_fraction: float = 0.9
    """Part of a worker's KV that active tasks may take; the rest absorbs what ended tasks leave behind."""


Batching = RequestBatching | TokenBatching


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualWindow:
    """Screenshots that stay in the context: each prompt ends with one, and old ones are pruned (appendix C.2)."""

    image_tokens: int
    most: int = 10
    """The context is pruned before it holds so many."""
    kept: int = 5
    """Of the newest, the one that comes included."""

    def __post_init__(self) -> None:
        if self.image_tokens < 1 or not 1 <= self.kept < self.most:
            raise ValueError(f"{self}: needs image_tokens >= 1 and 1 <= kept < most")


@dataclass(slots=True, eq=False)
class SimulatedTask:
    """A task on its way."""

    id: TrajectoryId
    group: GroupId
    script: Script
    on_end: Callable[["SimulatedTask", float], None]
    evaluation: bool = False
    kind: str = ""
    turn: int = 0
    context: int = 0
    images: int = 0
    """Screenshots in `context`."""
    split: int = 0
    """Tokens of the sequences that pruning ended: each is trained on as it was."""
    reusable: int = ANY_PREFIX
    """What its next prompt has in common with the one before."""
    worker: WorkerId | None = None
    request: EngineRequest | None = None
    epoch: int = 0
    """Grows when its request is taken away: what was under way is void."""

    @property
    def tokens(self) -> int:
        """What training gets of it."""
        return self.split + self.context


@dataclass(slots=True)
class _Worker:
    engine: Engine
    tasks: int = 0
    armed_s: float = -1.0
    open: bool = True


class TaskRollout:
    """Tasks on workers. `now_s` is the time of the event under way."""

    def __init__(
        self, model: WorkerModel, batching: Batching, workers: int, window: VisualWindow | None = None
    ) -> None:
        self.now_s = 0.0
        self.idle_s = 0.0
        """Time of serving workers without a request so far, mean over those that served at each moment, seconds."""
        self.workers: dict[WorkerId, _Worker] = {}
        self._model = model
        self._batching = batching
        self._window = window
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._tasks: dict[TrajectoryId, SimulatedTask] = {}
        self._queue: deque[SimulatedTask] = deque()
        self.batcher: TaskBatcher | None = None
        if isinstance(batching, TokenBatching):
            self.batcher = TaskBatcher(batching.settings, on_run=self._granted)
        self.set_workers(workers)

    # ---- time -------------------------------------------------------------------------------------------------------

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Run `act` at that time."""
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, act))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Take events until `until` holds or there are none."""
        while self._events and not until():
            at_s, _, act = heapq.heappop(self._events)
            self._pass_until(at_s)
            act()

    def _pass_until(self, at_s: float) -> None:
        if at_s > self.now_s:
            serving = [worker for worker in self.workers.values() if worker.open]
            idle = sum(worker.engine.idle for worker in serving)
            if idle:
                self.idle_s += (at_s - self.now_s) * idle / len(serving)
            self.now_s = at_s

    def _follow(self, worker: _Worker) -> None:
        wake_s = worker.engine.wake_s
        if wake_s is not None and wake_s != worker.armed_s:
            worker.armed_s = wake_s
            self.at(wake_s, lambda: self._tick(worker))

    def _tick(self, worker: _Worker) -> None:
        if worker.engine.wake_s != self.now_s:
            return
        worker.armed_s = -1.0
        self._handle(worker, worker.engine.advance())

    def _handle(self, worker: _Worker, outcomes: list[tuple[Outcome, EngineRequest]]) -> None:
        for outcome, request in outcomes:
            if outcome is Outcome.FINISHED:
                task: SimulatedTask = request.payload  # type: ignore[assignment]
                self._turn_over(task)
        self._follow(worker)

    # ---- workers ----------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> list[WorkerId]:
        """Workers that take tasks."""
        return [id_ for id_, worker in self.workers.items() if worker.open]

    def set_workers(self, count: int) -> None:
        """From now on so many workers serve. Tasks of those that close go on elsewhere from their prefix."""
        known = self.serving
        for number in range(len(self.workers), len(self.workers) + max(0, count - len(known))):
            engine = Engine(self._model.costs, self._model.limits, Role.COLOCATED)
            self.workers[WorkerId(number)] = _Worker(engine)
        for id_ in known[count:]:
            self._close(id_)
        self._budget()
        self._dispatch()

    def _close(self, id_: WorkerId) -> None:
        worker = self.workers[id_]
        worker.open = False
        for request in worker.engine.interrupt(self.now_s):
            task: SimulatedTask = request.payload  # type: ignore[assignment]
            task.request = None
            task.epoch += 1
            if self.batcher is None:
                task.worker = None
                worker.tasks -= 1
                self._queue.appendleft(task)
            else:
                # Its turn begins again where there is room for it.
                self.batcher.turn_over(task.id, task.context)
                self.at(self.now_s, lambda t=task, e=task.epoch: self._again(t, e))  # type: ignore[misc]
        worker.engine.clear()

    def _again(self, task: SimulatedTask, epoch: int) -> None:
        if task.id in self._tasks and task.request is None and task.epoch == epoch:
            self._ask(task)

    def _budget(self) -> None:
        if self.batcher is not None and isinstance(self._batching, TokenBatching):
            tokens = int(self._model.limits.kv_tokens * self._batching.budget_fraction)
            self.batcher.set_budgets(dict.fromkeys(self.serving, tokens))

    def new_weights(self, pause_s: float) -> None:
        """Every worker takes newer weights: kept KV is void."""
        for id_ in self.serving:
            worker = self.workers[id_]
            worker.engine.weights_changed(self.now_s, pause_s)
            self._follow(worker)

    # ---- tasks ------------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """Tasks that were added and have not ended."""
        return len(self._tasks)

    def add(self, tasks: Sequence[SimulatedTask]) -> None:
        """Queue tasks, in their order."""
        for task in tasks:
            self._tasks[task.id] = task
            if self.batcher is None:
                self._queue.append(task)
            else:
                self.batcher.add(task.id, task.group, kind=task.kind, evaluation=task.evaluation)
        self._dispatch()

    def _dispatch(self) -> None:
        """Fixed concurrency: the worker with the fewest tasks takes the next one."""
        if self.batcher is not None or not isinstance(self._batching, RequestBatching):
            return
        while self._queue:
            serving = self.serving
            id_ = min(serving, key=lambda w: self.workers[w].tasks, default=None)
            if id_ is None or self.workers[id_].tasks >= self._batching.concurrency:
                return
            task = self._queue.popleft()
            task.worker = id_
            self.workers[id_].tasks += 1
            self._begin(task)

    def _begin(self, task: SimulatedTask) -> None:
        """The first turn waits for the environment; a turn that was interrupted begins at once."""
        if task.turn == 0 and task.context == 0 and task.script.reset_s:
            self.at(self.now_s + task.script.reset_s, lambda: self._submit(task))
        else:
            self._submit(task)

    def _granted(self, id_: TrajectoryId, worker: WorkerId) -> None:
        task = self._tasks[id_]
        task.worker = worker
        self._begin(task)

    def _submit(self, task: SimulatedTask) -> None:
        scripted = task.script.turns[task.turn]
        assert task.worker is not None
        worker = self.workers[task.worker]
        if not worker.open:
            # It closed while the environment started: another one is found.
            self._requeue(task)
            return
        first = task.script.turns[0].prompt_tokens
        task.request = EngineRequest(
            rid=f"{task.id}.{task.turn}",
            prompt_tokens=task.context + scripted.prompt_tokens,
            new_tokens=scripted.response_tokens,
            conversation=task.id,
            root=task.script.root,
            root_tokens=self._common(first) if task.script.root else 0,
            reusable=task.reusable,
            payload=task,
        )
        worker.engine.submit(task.request, self.now_s)
        self._follow(worker)

    def _requeue(self, task: SimulatedTask) -> None:
        if self.batcher is None:
            task.worker = None
            self._queue.appendleft(task)
            self._dispatch()
        else:
            self._ask(task)

    def _ask(self, task: SimulatedTask) -> None:
        assert self.batcher is not None
        scripted = task.script.turns[task.turn]
        self.batcher.turn(task.id, task.context + scripted.prompt_tokens, scripted.response_tokens)

    def _turn_over(self, task: SimulatedTask) -> None:
        scripted = task.script.turns[task.turn]
        task.request = None
        task.context += scripted.prompt_tokens + scripted.response_tokens
        task.turn += 1
        task.reusable = ANY_PREFIX
        if task.turn == len(task.script.turns):
            self.at(self.now_s + scripted.tool_s, lambda: self._end(task))
            return
        self._prune(task)
        if self.batcher is not None:
            self.batcher.turn_over(task.id, task.context)
        self.at(self.now_s + scripted.tool_s, lambda: self._next_turn(task))

    def _common(self, first: int) -> int:
        """Tokens of the first prompt before its screenshot."""
        return first if self._window is None else max(1, first - self._window.image_tokens)

    def _prune(self, task: SimulatedTask) -> None:
        """Before the next screenshot would be one too many, all but the newest leave the context."""
        window = self._window
        if window is None:
            return
        task.images += 1
        if task.images + 1 == window.most:
            task.split += task.context
            task.context -= (task.images - (window.kept - 1)) * window.image_tokens
            task.images = window.kept - 1
            task.reusable = self._common(task.script.turns[0].prompt_tokens)

    def _next_turn(self, task: SimulatedTask) -> None:
        if self.batcher is not None:
            self._ask(task)
        elif task.worker is not None and self.workers[task.worker].open:
            self._submit(task)
        else:
            self._requeue(task)

    def _end(self, task: SimulatedTask) -> None:
        del self._tasks[task.id]
        if self.batcher is not None:
            self.batcher.end(task.id)
        elif task.worker is not None:
            self.workers[task.worker].tasks -= 1
            self._dispatch()
        task.on_end(task, self.now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """What a rollout of a fixed set of tasks came to."""

    makespan_s: float
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    retractions: int
    paused: int = 0

    @property
    def hit_rate(self) -> float:
        """Part of prompt tokens that were found in the cache."""
        prompts = self.prefilled_tokens + self.cached_tokens
        return self.cached_tokens / prompts if prompts else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.makespan_s


def roll_out(
    scripts: Sequence[Script], group_size: int, model: WorkerModel, batching: Batching, workers: int = 1
) -> RolloutSummary:
    """Play all scripts from the beginning to the end; neighbours make groups of `group_size`."""
    ends: list[float] = []
    rollout = TaskRollout(model, batching, workers)
    rollout.add(
        [
            SimulatedTask(
                TrajectoryId(f"t{n:08d}"),
                GroupId(f"g{n // group_size:06d}"),
                script,
                lambda _task, now_s: ends.append(now_s),
            )
            for n, script in enumerate(scripts)
        ]
    )
    rollout.run()
    if len(ends) != len(scripts):
        raise RuntimeError(f"{len(scripts) - len(ends)} of {len(scripts)} tasks never ended")
    meters = [worker.engine.meter for worker in rollout.workers.values()]
    return RolloutSummary(
        makespan_s=max(ends),
        generated_tokens=sum(meter.generated_tokens for meter in meters),
        prefilled_tokens=sum(meter.prefill_tokens for meter in meters),
        cached_tokens=sum(meter.cached_tokens for meter in meters),
        retractions=sum(meter.retractions for meter in meters),
        paused=rollout.batcher.counts.paused if rollout.batcher else 0,
    )
