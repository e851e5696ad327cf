"""The worker process: hosts one engine, serves its parent's commands between iterations, and keeps the emulated pace.

A loop of its own: listen (until the emulated device is done with what it does), send what is done, serve commands,
take in KV that arrived, run one iteration. So every command is served within one iteration, and pings at once.
"""

import importlib
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final

from pearl_executor.pacing import Pace
from pearl_executor.ports import TransferError, WorkerError
from pearl_executor.runtimes.local.frames import Frame, FrameSocket, listen
from pearl_executor.runtimes.local.handover import KvPulls, KvRooms, Pull
from pearl_executor.runtimes.local.hosting import Hosted, Output
from pearl_executor.runtimes.local.polling import Poller
from pearl_executor.runtimes.local.wire import (
    Head,
    chunks_to_wire,
    interrupted_before_start,
    request_from_wire,
    result_to_wire,
)
from pearl_executor.tracing import WorkerTrace, open_trace
from pearl_state.roles import Role

_PATIENCE_S: Final = 60.0
_CATCH_UP_S: Final = 0.02
"""How much lateness (of the host, or of a busy machine) the next iteration's pause may make up for."""


class Host:
    """One engine and what surrounds it. `channel` leads to the parent; `listener` is where decode workers pull KV.

    `address` is how they reach it, `key` what they must show.
    """

    def __init__(
        self,
        channel: FrameSocket,
        listener: socket.socket,
        hosted: Hosted,
        pace: Pace,
        *,
        room_ttl_s: float,
        pull_timeout_s: float,
        address: str = "",
        key: str = "",
        trace: WorkerTrace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._trace = trace
        self._engine = hosted.engine
        self._pace = pace
        self._clock = clock
        self._poller = Poller()
        self._poller.add(channel, self._heard)
        self._address = address
        self._rooms = KvRooms(listener, self._poller, clock, room_ttl_s, key)
        self._pulls = KvPulls(
            self._poller, clock, pace, hosted.read_blob, hosted.engine.held_tokens, timeout_s=pull_timeout_s, key=key
        )
        self._inbox: deque[Frame] = deque()
        self._calls: dict[str, int] = {}
        """The parent's call of each request in the engine."""
        self._unwanted: set[str] = set()
        """Requests in the engine whose hand-over was called off before it was exported."""
        self._transfer_s: dict[str, float] = {}
        self._idle_calls: list[int] = []
        self._busy_until_s = 0.0
        self._done: Callable[[], None] | None = None
        """What becomes visible once the emulated device is done; None while it does nothing."""
        self._continuous = False
        self._released = False
        self._stopped = False
        self._commands: dict[str, Callable[[Frame], Head | None]] = {
            "describe": self._describe,
            "generate": self._generate,
            "prefill": self._generate,
            "decode": self._decode,
            "abort": self._abort,
            "interrupt": self._interrupt,
            "wait_idle": self._wait_idle,
            "release": self._release,
            "resume": self._resume,
            "switch_role": self._switch_role,
            "load_weights": self._load_weights,
            "samples": self._samples,
            "forget": self._forget,
            "stop": self._stop,
        }

    def run(self) -> None:
        """Serve until the parent says stop or hangs up."""
        while not self._stopped and not self._channel.closed:
            self._poller.wait(self._wait_s())
            if self._done is not None and self._clock() >= self._busy_until_s:
                done, self._done = self._done, None
                done()
            while self._inbox and self._done is None:
                self._serve(self._inbox.popleft())
            if self._done is None:
                self._advance()

    def _wait_s(self) -> float:
        now_s = self._clock()
        if self._done is not None:
            return self._busy_until_s - now_s
        if self._inbox or self._engine.has_work:
            return 0.0
        self._continuous = False
        return min(_PATIENCE_S, self._rooms.expire() - now_s, self._pulls.next_due_s() - now_s)

    def _advance(self) -> None:
        """Between two iterations: take KV in, then run the next one."""
        if len(self._rooms):
            self._rooms.expire()
        for pull in self._pulls.arrived():
            self._take_in(pull)
        if self._engine.has_work:
            self._iterate()
        if self._idle_calls and self._idle:
            for call in self._idle_calls:
                self._send({"re": call})
            self._idle_calls.clear()

    def _iterate(self) -> None:
        began_s = self._clock()
        output = self._engine.step()
        # Back to back iterations follow the emulated device's time, not the host's: its overhead is made up for.
        start_s = max(self._busy_until_s, began_s - _CATCH_UP_S) if self._continuous else began_s
        self._continuous = True
        self._occupy(start_s + output.compute_s + output.paced_s, lambda: self._emit(output))

    def _occupy(self, until_s: float, done: Callable[[], None]) -> None:
        """Keep the emulated device busy until `until_s`, then call `done`; at once where that is past."""
        now_s = self._clock()
        if until_s <= now_s:
            self._busy_until_s = max(until_s, now_s - _CATCH_UP_S)
            done()
        else:
            self._busy_until_s = until_s
            self._done = done

    def _emit(self, output: Output) -> None:
        """Send what an iteration produced: one frame for all tokens, then the answers of calls that ended."""
        if output.chunks:
            self._send(*chunks_to_wire(output.chunks))
        for rid, blob in output.exported.items():
            if rid in self._unwanted:
                self._unwanted.discard(rid)
            else:
                self._rooms.offer(rid, blob)
            self._send({"re": self._calls.pop(rid), "exported": blob.nbytes})
        for rid, result in output.finished.items():
            self._unwanted.discard(rid)
            head = result_to_wire(result, self._transfer_s.pop(rid, 0.0))
            self._send({"re": self._calls.pop(rid), **head})

    def _take_in(self, pull: Pull) -> None:
        rid = pull.request.rid
        try:
            if pull.error:
                raise TransferError(f"KV of {rid} did not arrive: {pull.error}")
            self._engine.add(pull.request, kv=pull.blob)
        except WorkerError as error:
            if isinstance(error, TransferError) and not pull.error and self._pulls.retry_whole(pull):
                return
            self._answer_error(pull.call, error)
        else:
            self._calls[rid] = pull.call
            self._transfer_s[rid] = pull.transfer_s
        self._pulls.done(pull)

    @property
    def _idle(self) -> bool:
        return self._done is None and not (self._engine.has_work or len(self._pulls) or len(self._rooms))

    def _send(self, head: Head, body: bytes = b"") -> None:
        if self._trace is not None:
            self._trace.answered(head)
        self._channel.send(head, body)

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _heard(self, channel: FrameSocket, frame: Frame) -> None:
        op = frame.head["op"]
        if op == "ping":
            channel.send({"op": "pong"})
        elif op == "drop":
            self._drop(frame.head["room"])
        else:
            if self._trace is not None:
                self._trace.arrived(frame.head)
            self._inbox.append(frame)

    def _drop(self, room: str) -> None:
        """Nobody will claim this hand-over any more, also where its prefill is still under way."""
        if room in self._calls:
            self._unwanted.add(room)
        self._rooms.drop(room)

    def _serve(self, frame: Frame) -> None:
        call = frame.head["call"]
        try:
            answer = self._commands[frame.head["op"]](frame)
        except WorkerError as error:
            self._answer_error(call, error)
            return
        if answer is not None:
            self._send({"re": call, **answer})

    def _answer_error(self, call: int, error: WorkerError) -> None:
        kind = "transfer" if isinstance(error, TransferError) else "refused"
        self._send({"re": call, "error": kind, "message": str(error)})

    def _describe(self, frame: Frame) -> Head:
        del frame
        return {"role": self._engine.role, "peer": self._address}

    def _generate(self, frame: Frame) -> None:
        self._check_new(frame, Role.PREFILL if frame.head["op"] == "prefill" else Role.COLOCATED)
        request = request_from_wire(frame)
        self._engine.add(request)
        self._calls[request.rid] = frame.head["call"]

    def _decode(self, frame: Frame) -> None:
        self._check_new(frame, Role.DECODE)
        request = request_from_wire(frame)
        self._pulls.begin(Pull(request, frame.head["call"], frame.head["peer"], asked_s=self._clock()))

    def _check_new(self, frame: Frame, role: Role) -> None:
        rid = frame.head["rid"]
        if rid in self._calls or rid in self._pulls:
            raise WorkerError(f"request {rid} is in this worker already; a retry needs an id of its own")
        if self._released:
            raise WorkerError(f"request {rid} came to a worker whose device memory is released")
        if self._engine.role is not role:
            raise WorkerError(f"request {rid} is for a {role} worker, this one's role is {self._engine.role}")

    def _abort(self, frame: Frame) -> Head:
        rid = frame.head["rid"]
        waiting = self._end_pulls(rid)
        self._engine.abort(rid)
        return {"known": bool(waiting) or rid in self._calls}

    def _interrupt(self, frame: Frame) -> Head:
        del frame
        count = len(self._calls) + self._end_pulls(None)
        self._engine.abort(None)
        return {"count": count}

    def _end_pulls(self, rid: str | None) -> int:
        cancelled = self._pulls.cancel(rid)
        for pull in cancelled:
            self._send({"re": pull.call, **interrupted_before_start()})
        return len(cancelled)

    def _wait_idle(self, frame: Frame) -> None:
        self._idle_calls.append(frame.head["call"])

    def _release(self, frame: Frame) -> None:
        self._check_idle("release its memory")
        if self._released:
            raise WorkerError("cannot release: the device memory is released already")
        began_s = self._clock()
        report = self._engine.release()
        self._released = True
        self._finish(frame, began_s + self._pace.release_s, asdict(report))

    def _resume(self, frame: Frame) -> None:
        if not self._released:
            raise WorkerError("cannot resume: the device memory is not released")
        began_s = self._clock()
        report = self._engine.resume()
        self._released = False
        self._finish(frame, began_s + self._pace.resume_s, asdict(report))

    def _switch_role(self, frame: Frame) -> None:
        self._check_idle("switch its role")
        began_s = self._clock()
        self._engine.set_role(Role(frame.head["role"]))
        self._finish(frame, began_s + self._pace.switch_s, {})

    def _load_weights(self, frame: Frame) -> None:
        head = frame.head
        began_s = self._clock()
        version = self._engine.load_weights(head["uri"], head["version"], head["checksum"])
        self._finish(frame, began_s + self._pace.load_s, {"version": version})

    def _finish(self, frame: Frame, until_s: float, answer: Head) -> None:
        """Answer when the emulated device is done; it does nothing else until then."""
        call = frame.head["call"]
        self._continuous = False
        self._occupy(until_s, lambda: self._send({"re": call, **answer}))

    def _check_idle(self, what: str) -> None:
        if not self._idle:
            held = (
                f"{len(self._calls)} requests, {len(self._pulls)} awaited and {len(self._rooms)} unclaimed hand-overs"
            )
            raise WorkerError(f"a worker cannot {what} while it holds work ({held}); drain it first")

    def _samples(self, frame: Frame) -> Head:
        del frame
        samples = self._engine.take_samples()
        samples = replace(
            samples,
            transfer=samples.transfer + self._pulls.take_samples(),
            waiting=samples.waiting + len(self._pulls),
        )
        return {"samples": asdict(samples)}

    def _forget(self, frame: Frame) -> Head:
        self._pulls.forget(frame.head["peer"])
        return {}

    def _stop(self, frame: Frame) -> Head:
        del frame
        self._stopped = True
        return {}


def main(channel: FrameSocket, arguments: dict[str, Any]) -> None:
    """Target of the fork server: build the engine and host it until the parent is done with it."""
    began_ns = time.time_ns()
    module, _, name = arguments["factory"].partition(":")
    build = getattr(importlib.import_module(module), name)
    hosted: Hosted = build(arguments["settings"], Role(arguments["role"]))
    listener, address = listen(arguments["listen"])
    tracing = arguments.get("tracing")
    trace = open_trace(tracing)
    try:
        with listener:
            host = Host(
                channel,
                listener,
                hosted,
                Pace(**arguments["pace"]),
                room_ttl_s=arguments["room_ttl_s"],
                pull_timeout_s=arguments["pull_timeout_s"],
                address=address,
                key=arguments["key"],
                trace=trace,
            )
            if trace is not None and tracing is not None:
                trace.started(tracing["traceparent"], began_ns)
            host.run()
    finally:
        if trace is not None:
            trace.close()
