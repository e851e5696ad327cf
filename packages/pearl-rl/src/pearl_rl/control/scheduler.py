"""The Elastic Scheduler: one queue in, one consumer, one task per effect out (PEARL section 4.1)."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from pearl_planner.elastic import ElasticState
from pearl_planner.step import step
from pearl_rl.rollout.batch_rollout import first_error
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


class EventJournal(Protocol):
    """Where events are made durable before they are applied."""

    def append(self, event: Event, loads: Mapping[WorkerId, float]) -> None:
        """Take in an event that will be applied with `loads`."""
        ...

    async def commit(self) -> None:
        """Return once everything appended is durable. Raises where the disk refuses: the run must end then."""
        ...

    def applied(self, state: ElasticState) -> None:
        """Everything appended was applied and gave `state`."""
        ...


class ElasticScheduler:
    """Serializes events through the core, shows the table to the router, and runs effects beside it.

    After each event the router sees the new table *before* any effect starts: a worker leaves routing before it is
    drained, and enters it only by the table. Events are handled strictly in the order of `post`. With a journal, those
    that wait are made durable together before the first of them is applied.
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
        journal: EventJournal | None = None,
    ) -> None:
        self.state = state
        self._executor = executor
        self._routing = routing
        self._training = training
        self._returned = returned
        self._on_step = on_step
        self._journal = journal
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def post(self, event: Event) -> None:
        """Hand an event in; it is handled after those before it."""
        self._events.put_nowait(event)

    def stop(self) -> None:
        """Let `run` return after the events before this call; effects under way are cancelled."""
        self._events.put_nowait(None)

    async def run(self) -> None:
        """Handle events until `stop`.

        Raises what `journal` or `on_step` raised, e.g. of a full disk, or what a bug in the core or an executor did.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._handle_events(tasks)
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None

    async def _handle_events(self, tasks: asyncio.TaskGroup) -> None:
        running: set[asyncio.Task[None]] = set()
        ended = False
        while not ended:
            events, ended = await self._waiting()
            for event, loads in await self._durable(events):
                self.state, effects = step(self.state, event, self._routing.loads() if loads is None else loads)
                self._routing.apply(self.state.table)
                self._on_step(event, self.state, effects)
                for effect in effects:
                    self._start(tasks, running, effect)
            if self._journal is not None:
                self._journal.applied(self.state)
        for task in running:
            task.cancel()

    async def _waiting(self) -> tuple[list[Event], bool]:
        """All events that wait, at least one, and whether the end comes after them."""
        events: list[Event] = []
        event = await self._events.get()
        while event is not None:
            events.append(event)
            if self._events.empty():
                return events, False
            event = self._events.get_nowait()
        return events, True

    async def _durable(self, events: list[Event]) -> list[tuple[Event, Mapping[WorkerId, float] | None]]:
        """The events, once they cannot be lost any more, with the loads that they were journalled with."""
        if self._journal is None:
            return [(event, None) for event in events]
        loads = self._routing.loads()
        for event in events:
            self._journal.append(event, loads)
        await self._journal.commit()
        return [(event, loads) for event in events]

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
