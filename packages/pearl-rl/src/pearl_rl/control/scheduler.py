"""The Elastic Scheduler: one queue in, one consumer, one task per effect out (PEARL section 4.1)."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from pearl_planner.elastic import ElasticState
from pearl_planner.step import step
from pearl_state.effects import Effect, GrantTraining, RecordDecision, ReturnGpus
from pearl_state.events import Event
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, WorkerId

Post = Callable[[Event], None]


class Executor(Protocol):
    """Carries an effect out and answers with events; expected failures are answers too."""

    async def run(self, effect: Effect, post: Post) -> None:
        """Return when the effect is done and answered. A cancelled preparation cleans up and answers before it ends."""
        ...


class Routing(Protocol):
    """What follows the table: the router."""

    def apply(self, table: WorkerTable) -> None:
        """From now on only workers that are active in `table` get requests."""
        ...

    def loads(self) -> Mapping[WorkerId, float]:
        """Requests that each worker holds."""
        ...


class Gate(Protocol):
    """Where training waits for its GPUs."""

    def grant(self) -> None:
        """The training GPUs are training's."""
        ...


class ElasticScheduler:
    """Serializes events through the core, shows the table to the router, and runs effects beside it.

    After each event the router sees the new table *before* any effect starts: a worker leaves routing before it is
    drained, and enters it only by the table. Events are handled strictly in the order of `post`.
    """

    def __init__(
        self,
        state: ElasticState,
        *,
        executor: Executor,
        routing: Routing,
        training: Gate,
        returned: Callable[[frozenset[GpuId]], None] = lambda _gpus: None,
        on_step: Callable[[Event, ElasticState, tuple[Effect, ...]], None] = lambda _event, _state, _effects: None,
    ) -> None:
        self.state = state
        self._executor = executor
        self._routing = routing
        self._training = training
        self._returned = returned
        self._on_step = on_step
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def post(self, event: Event) -> None:
        """Hand an event in; it is handled after those before it."""
        self._events.put_nowait(event)

    def stop(self) -> None:
        """Let `run` return after the events before this call; effects under way are cancelled."""
        self._events.put_nowait(None)

    async def run(self) -> None:
        """Handle events until `stop`. Raises what a bug in the core or an executor raised."""
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            while (event := await self._events.get()) is not None:
                self.state, effects = step(self.state, event, self._routing.loads())
                self._routing.apply(self.state.table)
                self._on_step(event, self.state, effects)
                for effect in effects:
                    self._start(tasks, running, effect)
            for task in running:
                task.cancel()

    def _start(self, tasks: asyncio.TaskGroup, running: set[asyncio.Task[None]], effect: Effect) -> None:
        match effect:
            case GrantTraining():
                self._training.grant()
            case ReturnGpus():
                self._returned(effect.gpus)
            case RecordDecision():
                pass  # for whoever watches `on_step`
            case _:
                task = tasks.create_task(self._executor.run(effect, self.post))
                running.add(task)
                task.add_done_callback(running.discard)
