"""Trace context on its way to workers: which span the present task works for, as W3C `traceparent` text.

The run sets `TRACEPARENT` where it knows the span; what leaves the process meanwhile carries it: frames to worker
processes and Ray actors, and HTTP requests. Empty, which is the usual case, it costs a look at a context variable and
adds no byte. Nothing here needs OpenTelemetry: a worker process opens whoever writes its spans by name.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

TRACEPARENT: Final[ContextVar[str]] = ContextVar("traceparent", default="")
"""The span that the present task works for; empty where nobody traces."""

_REQUESTS: Final = frozenset({"generate", "prefill", "decode"})


def trace_headers() -> dict[str, str]:
    """The HTTP header that carries the context; none where there is no context."""
    context = TRACEPARENT.get()
    return {"traceparent": context} if context else {}


class SpanWriter(Protocol):
    """Writes finished spans of a worker process."""

    def write(
        self,
        kind: str,
        traceparent: str,
        began_ns: int,
        ended_ns: int,
        attributes: Mapping[str, str | int],
        failed: str | None,
    ) -> None:
        """One span of `kind` (`request`, `command`) below `traceparent`; wall-clock nanoseconds, cause of a failure."""
        ...

    def close(self) -> None:
        """Flush, within a bounded time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingRecipe:
    """How a worker process opens its `SpanWriter`."""

    opener: str
    """`module:function`, called in the worker as `function(settings, process) -> SpanWriter`."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values."""

    def arguments(self, process: str) -> dict[str, Any]:
        """What goes to the worker process of that name, with the context of its start."""
        settings = dict(self.settings)
        return {"opener": self.opener, "settings": settings, "process": process, "traceparent": TRACEPARENT.get()}


@dataclass(frozen=True, slots=True)
class _Begun:
    op: str
    traceparent: str
    at_ns: int
    rid: str


class WorkerTrace:
    """The spans of one worker process: one for each call that came with a context, from its arrival to its answer."""

    def __init__(self, writer: SpanWriter, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._writer = writer
        self._clock_ns = clock_ns
        self._begun: dict[int, _Begun] = {}

    def started(self, traceparent: str, began_ns: int) -> None:
        """The process is ready; `began_ns` is when it began."""
        if traceparent:
            about: dict[str, str | int] = {"pearl.op": "start", "process.pid": os.getpid()}
            self._writer.write("command", traceparent, began_ns, self._clock_ns(), about, None)

    def arrived(self, head: Mapping[str, Any]) -> None:
        """A call came in."""
        context = head.get("traceparent")
        if context and "call" in head:
            self._begun[head["call"]] = _Begun(head["op"], context, self._clock_ns(), str(head.get("rid", "")))

    def answered(self, head: Mapping[str, Any]) -> None:
        """An answer goes out."""
        begun = self._begun.pop(head.get("re", -1), None)
        if begun is None:
            return
        about: dict[str, str | int] = {"pearl.op": begun.op, "process.pid": os.getpid()}
        if begun.rid:
            about["pearl.request"] = begun.rid
        if "finish" in head:
            about["pearl.finish"] = str(head["finish"])
        kind = "request" if begun.op in _REQUESTS else "command"
        failed = str(head.get("message") or head["error"]) if "error" in head else None
        self._writer.write(kind, begun.traceparent, begun.at_ns, self._clock_ns(), about, failed)

    def close(self) -> None:
        """Flush, within a bounded time."""
        self._writer.close()


def open_trace(arguments: Mapping[str, Any] | None) -> WorkerTrace | None:
    """The trace of a worker process as `TracingRecipe.arguments` say; None where nobody traces."""
    if arguments is None:
        return None
    module, _, name = arguments["opener"].partition(":")
    writer: SpanWriter = getattr(importlib.import_module(module), name)(arguments["settings"], arguments["process"])
    return WorkerTrace(writer)
