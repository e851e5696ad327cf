"""Spans of other processes, below the span that a request's `traceparent` names: workers, and servers over HTTP."""

import atexit
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pearl_telemetry.instruments import SCOPE, Value
from pearl_telemetry.metrics import SPANS, Span
from pearl_telemetry.sdk import Telemetry, TelemetryError, TelemetryOptions, open_telemetry

_CARRIER: Final = TraceContextTextMapPropagator()
_SPANS: Final = {"request": SPANS.worker_request, "command": SPANS.worker_command}


class WorkerSpans:
    """Writes the finished spans of a worker process."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=telemetry.tracer_provider)

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
        span = self._tracer.start_span(
            _SPANS[kind].name,
            context=_CARRIER.extract({"traceparent": traceparent}),
            kind=SpanKind.SERVER,
            attributes=dict(attributes),
            start_time=began_ns,
        )
        if failed is not None:
            span.set_status(Status(StatusCode.ERROR, failed[:200]))
        span.end(end_time=ended_ns)

    def close(self) -> None:
        """Flush, within a bounded time."""
        self._telemetry.close()


def open_worker_spans(settings: Mapping[str, Any], process: str) -> WorkerSpans:
    """The spans of the worker process named `process`, to where `settings` say: `jsonl`, `otlp_endpoint`, `run`.

    A folder that this machine does not have is left out: a worker may be on another node.
    """
    folder = Path(settings["jsonl"]) if settings["jsonl"] else None
    options = TelemetryOptions(
        jsonl=folder if folder is not None and folder.is_dir() else None,
        otlp_endpoint=settings["otlp_endpoint"],
        run=settings["run"],
        process=process,
        spans_only=True,
    )
    return WorkerSpans(open_telemetry(options))


def open_planner_spans() -> Callable[[Mapping[str, str], str], AbstractContextManager[Any]]:
    """What `python -m pearl_planner serve --spans` takes; spans go to the collector of OTEL_EXPORTER_OTLP_ENDPOINT.

    Raises `ValueError` where that names none.
    """
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    try:
        if not endpoint:
            raise TelemetryError("set OTEL_EXPORTER_OTLP_ENDPOINT to a collector, like http://localhost:4318")
        telemetry = open_telemetry(TelemetryOptions(otlp_endpoint=endpoint, process="planner", spans_only=True))
    except TelemetryError as error:
        raise ValueError(str(error)) from None
    atexit.register(telemetry.close)
    provider = telemetry.tracer_provider
    return lambda headers, question: served(headers, SPANS.planner_request, {"pearl.op": question}, provider)


def served(
    headers: Mapping[str, str],
    span: Span,
    attributes: Mapping[str, Value] | None = None,
    tracer_provider: trace.TracerProvider | None = None,
) -> AbstractContextManager[Any]:
    """A context that is one span of a server, below the caller's; nothing where the caller sent no context.

    `headers` have lower-case names. `tracer_provider` defaults to the process's.
    """
    if "traceparent" not in headers:
        return nullcontext()
    context = _CARRIER.extract(headers)
    tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
    return tracer.start_as_current_span(span.name, context=context, kind=SpanKind.SERVER, attributes=attributes)
