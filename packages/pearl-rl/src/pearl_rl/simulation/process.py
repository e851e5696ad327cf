"""One simulated rollout process: its engine, driven by the event loop's timers, and its device state."""

import asyncio
from typing import Protocol

from pearl_executor.ports import WorkerLostError
from pearl_executor.virtual_time import VirtualTimeLoop
from pearl_rl.simulation.engine import Engine
from pearl_rl.simulation.requests import EngineRequest, Outcome
from pearl_state.roles import Role
from pearl_state.worker import Worker


class EngineListener(Protocol):
    """Whose request it is; the `payload` of every request here."""

    def on_outcome(self, process: "SimulatedProcess", request: EngineRequest, outcome: Outcome) -> None:
        """Something became of the request on `process`."""
        ...

    def on_interrupted(self, process: "SimulatedProcess", request: EngineRequest) -> None:
        """The request was taken out with the tokens it has."""
        ...

    def on_lost(self, error: WorkerLostError) -> None:
        """The process is gone."""
        ...

    def on_new_weights(self, process: "SimulatedProcess", request: EngineRequest) -> None:
        """What was generated so far is of the old weights."""
        ...


class SimulatedProcess:
    """An engine with a timer. Its clock is the running loop's."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self.worker = worker
        self.engine = engine
        self.version: int | None = None
        self.resident = True
        self.ready = False
        self.loading = False
        self.lost = False
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualTimeLoop):
            raise RuntimeError("a simulated process lives in virtual time: run it by pearl_executor.virtual_time")
        self._loop = loop
        self._armed_s: float | None = None
        """When the engine's next event is, as `follow` saw it last."""
        self._on_alarm = self._tick
        self._idle_waiters: list[asyncio.Future[None]] = []

    @property
    def role(self) -> Role:
        """The role that its engine has."""
        return self.engine.role

    def now_s(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    def handle(self, outcomes: list[tuple[Outcome, EngineRequest]]) -> None:
        """Tell whoever owns the requests, then follow the engine's next wake-up."""
        for outcome, request in outcomes:
            listener: EngineListener | None = request.payload  # type: ignore[assignment]
            # Whoever was called off in this very instant has let go of its request.
            if listener is not None:
                listener.on_outcome(self, request, outcome)
        self.follow()

    def follow(self) -> None:
        """Arm the timer for the engine's next event, and wake whoever waits for it to be idle."""
        engine = self.engine
        wake_s = engine.wake_s
        if wake_s != self._armed_s:
            self._armed_s = wake_s
            if wake_s is not None:
                self._loop.alarm(wake_s, self._on_alarm)
        if self._idle_waiters and engine.idle:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _tick(self) -> None:
        if self._armed_s is None or self._armed_s > self._loop.time():
            return  # the engine changed its mind since, and another alarm is set
        self._armed_s = None
        self.handle(self.engine.advance())

    def interrupt(self) -> int:
        """Take every request out; each is told. Returns how many."""
        taken = self.engine.interrupt(self.now_s())
        for request in taken:
            listener: EngineListener = request.payload  # type: ignore[assignment]
            listener.on_interrupted(self, request)
        self.follow()
        return len(taken)

    def cut(self, request: EngineRequest) -> None:
        """Take one request out, with the tokens it has."""
        outcomes = self.engine.abort(request, self.now_s())
        listener: EngineListener = request.payload  # type: ignore[assignment]
        listener.on_interrupted(self, request)
        self.handle(outcomes)

    async def idle(self) -> None:
        """Return once the engine holds no request."""
        if self.engine.idle:
            return
        waiter = self._loop.create_future()
        self._idle_waiters.append(waiter)
        await waiter

    def take_weights(self, version: int, pause_s: float) -> None:
        """The engine has newer weights; what runs goes on with them after a pause."""
        for request in self.engine.requests():
            listener: EngineListener = request.payload  # type: ignore[assignment]
            listener.on_new_weights(self, request)
        self.engine.weights_changed(self.now_s(), pause_s)
        self.engine.kv.version = version
        self.version = version
        self.follow()

    def lose(self) -> None:
        """The process is gone with all that it held."""
        self.lost = True
        error = WorkerLostError(f"worker {self.worker.id}.{self.worker.incarnation} is gone", self.worker.id)
        for request in self.engine.interrupt(self.now_s()):
            listener: EngineListener = request.payload  # type: ignore[assignment]
            listener.on_lost(error)
        self.follow()
