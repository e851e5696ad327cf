"""Providers and exporters, where the `[sdk]` extra is installed: JSON lines, OTLP, Prometheus; spans, metrics, logs.

The run itself uses the OpenTelemetry API alone. `open_telemetry` configures what its points and spans go to, and
`Telemetry.close` flushes within a bounded time: a collector that does not answer never holds a run up.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

from opentelemetry import metrics, trace
from opentelemetry._logs import LoggerProvider

from pearl_telemetry.context import ChosenIds
from pearl_telemetry.instruments import SCOPE

_FLUSH_S: Final = 5.0
_EXPORT_S: Final = 5.0
_SPANS_S: Final = 1.0
_MOST_SPANS: Final = 65_536
"""Spans that wait to be sent; more are dropped."""
_MOST_SENT: Final = 2_048


class TelemetryError(Exception):
    """Telemetry that cannot be set up: says what is missing, or which address, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """Where telemetry goes. Nothing set: nowhere, and no SDK is needed."""

    jsonl: Path | None = None
    """Folder that gets `spans.jsonl`, `points.jsonl` and `logs.jsonl`."""
    otlp_endpoint: str = ""
    """Collector's OTLP/HTTP address, like http://localhost:4318."""
    prometheus_port: int = 0
    """Port of a page that Prometheus scrapes; 0 for none. On loopback unless `prometheus_host` says otherwise."""
    prometheus_host: str = "127.0.0.1"
    interval_s: float = 10.0
    """Seconds between exports of metrics."""
    run: str = ""
    """Name of the run, as a resource attribute."""
    process: str = ""
    """Name of this process within the run, as a resource attribute."""
    spans_only: bool = False
    """Whether metrics are somebody else's."""

    @property
    def wanted(self) -> bool:
        """Whether anything is set."""
        return self.jsonl is not None or bool(self.otlp_endpoint) or self.prometheus_port > 0


class Telemetry:
    """Configured providers. `close` flushes and stops them."""

    def __init__(
        self,
        meter_provider: metrics.MeterProvider | None = None,
        tracer_provider: trace.TracerProvider | None = None,
        closing: Sequence[Any] = (),
        ids: ChosenIds | None = None,
        logger_provider: LoggerProvider | None = None,
    ) -> None:
        self.meter_provider = meter_provider
        self.tracer_provider = tracer_provider
        self.logger_provider = logger_provider
        """Where log records go; None where nobody takes them."""
        self.ids = ids
        """Gives spans the ids that were chosen for them; None without an SDK."""
        self._closing = closing

    def close(self) -> None:
        """Flush and stop everything, each within five seconds. A collector that is gone is no error."""
        for part in self._closing:
            # Shutting down flushes; a thread bounds exporters that would wait longer than they say.
            stopper = threading.Thread(target=part, name="telemetry shutdown", daemon=True)
            stopper.start()
            stopper.join(_FLUSH_S)


def open_telemetry(options: TelemetryOptions) -> Telemetry:
    """Configure what `options` ask for. Raises `TelemetryError` with one line."""
    if not options.wanted:
        return Telemetry()
    sdk_metrics = _load("opentelemetry.sdk.metrics")
    sdk_trace = _load("opentelemetry.sdk.trace")
    resources = _load("opentelemetry.sdk.resources")
    about = {"service.name": SCOPE, "pearl.run": options.run}
    if options.process:
        about["service.instance.id"] = options.process
    resource = resources.Resource.create(about)
    readers: list[Any] = []
    closing: list[Any] = []
    ids = ChosenIds()
    tracer_provider = sdk_trace.TracerProvider(resource=resource, id_generator=ids)
    if options.jsonl is not None:
        _add_jsonl(options, tracer_provider, readers, closing)
    if options.otlp_endpoint:
        _add_otlp(options, tracer_provider, readers)
    if options.prometheus_port:
        _add_prometheus(options, readers, closing)
    if options.spans_only:
        return Telemetry(None, tracer_provider, [tracer_provider.shutdown, *closing], ids)
    meter_provider = sdk_metrics.MeterProvider(resource=resource, metric_readers=readers)
    logs = _logs(options, resource, closing)
    stop = [tracer_provider.shutdown, meter_provider.shutdown, *([logs.shutdown] if logs else []), *closing]
    return Telemetry(meter_provider, tracer_provider, stop, ids, logs)


def _load(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise TelemetryError(
            f"telemetry needs {module.split('.')[0]} parts that are not installed; add pearl-telemetry[sdk]"
        ) from None


def _periodic(exporter: Any, options: TelemetryOptions) -> Any:
    export = _load("opentelemetry.sdk.metrics.export")
    return export.PeriodicExportingMetricReader(
        exporter, export_interval_millis=options.interval_s * 1000, export_timeout_millis=_EXPORT_S * 1000
    )


def _batches(export: Any, exporter: Any) -> Any:
    # A process that is killed takes along what it has not sent. A step's trajectories come all at once.
    return export.BatchSpanProcessor(
        exporter, schedule_delay_millis=_SPANS_S * 1000, max_queue_size=_MOST_SPANS, max_export_batch_size=_MOST_SENT
    )


def _add_otlp(options: TelemetryOptions, tracer_provider: Any, readers: list[Any]) -> None:
    endpoint = options.otlp_endpoint.rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise TelemetryError(f"OTLP endpoint '{endpoint[:80]}': must begin with http:// or https://")
    spans = _load("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    points = _load("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    export = _load("opentelemetry.sdk.trace.export")
    tracer_provider.add_span_processor(
        _batches(export, spans.OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=_EXPORT_S))
    )
    if options.spans_only:
        return
    readers.append(_periodic(points.OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics", timeout=_EXPORT_S), options))


def _add_prometheus(options: TelemetryOptions, readers: list[Any], closing: list[Any]) -> None:
    exporter = _load("opentelemetry.exporter.prometheus")
    client = _load("prometheus_client")
    try:
        server, _ = client.start_http_server(options.prometheus_port, options.prometheus_host)
    except (OSError, OverflowError) as error:
        where = f"{options.prometheus_host} port {options.prometheus_port}"
        raise TelemetryError(f"Prometheus page cannot listen on {where}: {error}") from None
    readers.append(exporter.PrometheusMetricReader())
    closing += [server.shutdown, server.server_close]


def _logs(options: TelemetryOptions, resource: Any, closing: list[Any]) -> Any:
    """Where log records go: to the collector, and into the folder; None for neither."""
    if not options.otlp_endpoint and options.jsonl is None:
        return None
    sdk, export = _load("opentelemetry.sdk._logs"), _load("opentelemetry.sdk._logs.export")
    provider = sdk.LoggerProvider(resource=resource, shutdown_on_exit=False)
    exporters = []
    if options.otlp_endpoint:
        otlp = _load("opentelemetry.exporter.otlp.proto.http._log_exporter")
        endpoint = f"{options.otlp_endpoint.rstrip('/')}/v1/logs"
        exporters.append(otlp.OTLPLogExporter(endpoint=endpoint, timeout=_EXPORT_S))
    if options.jsonl is not None:
        lines = _Lines(options.jsonl / "logs.jsonl")
        closing.append(lines.close)
        exporters.append(_log_lines(export, lines))
    for exporter in exporters:
        provider.add_log_record_processor(
            export.BatchLogRecordProcessor(exporter, schedule_delay_millis=_SPANS_S * 1000)
        )
    return provider


# ---- JSON lines ------------------------------------------------------------------------------------------------------


class _Lines:
    """A file of JSON lines that several threads and processes write: rows that come together are one write."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._file: IO[bytes] = path.open("ab", buffering=0)
        except OSError as error:
            raise TelemetryError(f"{path}: cannot be written: {error.strerror or error}") from None

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        with self._lock:
            if not self._file.closed:
                self._file.write(text.encode())

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _add_jsonl(options: TelemetryOptions, tracer_provider: Any, readers: list[Any], closing: list[Any]) -> None:
    export, points = _load("opentelemetry.sdk.trace.export"), _load("opentelemetry.sdk.metrics.export")
    folder = options.jsonl
    if folder is None:
        return
    span_lines = _Lines(folder / "spans.jsonl")

    class Spans(export.SpanExporter):  # type: ignore[misc,name-defined]
        def export(self, spans: Sequence[Any]) -> Any:
            span_lines.write([span_row(span) for span in spans])
            return export.SpanExportResult.SUCCESS

    class Points(points.MetricExporter):  # type: ignore[misc,name-defined]
        def export(self, metrics_data: Any, timeout_millis: float = 10_000, **kwargs: Any) -> Any:  # noqa: ARG002
            point_lines.write(point_rows(metrics_data))
            return points.MetricExportResult.SUCCESS

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:  # noqa: ARG002
            return None

        def force_flush(self, timeout_millis: float = 10_000) -> bool:  # noqa: ARG002
            return True

    tracer_provider.add_span_processor(_batches(export, Spans()))
    closing.append(span_lines.close)
    if options.spans_only:
        return
    point_lines = _Lines(folder / "points.jsonl")
    readers.append(_periodic(Points(), options))
    closing.append(point_lines.close)


def _log_lines(export: Any, lines: _Lines) -> Any:
    class Logs(export.LogRecordExporter):  # type: ignore[misc]
        def export(self, batch: Sequence[Any]) -> Any:
            lines.write([log_row(record.log_record) for record in batch])
            return export.LogRecordExportResult.SUCCESS

        def shutdown(self) -> None:
            return None

        def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
            return True

    return Logs()


def log_row(record: Any) -> dict[str, Any]:
    """A log record as one JSON object."""
    return {
        "at_s": record.timestamp / 1e9,
        "level": record.severity_text,
        "text": record.body,
        "trace": f"{record.trace_id:032x}" if record.trace_id else None,
        "span": f"{record.span_id:016x}" if record.span_id else None,
        "attributes": dict(record.attributes or {}),
    }


def span_row(span: Any) -> dict[str, Any]:
    """A finished SDK span as one JSON object."""
    context, parent = span.get_span_context(), span.parent
    row = {
        "name": span.name,
        "trace": f"{context.trace_id:032x}",
        "span": f"{context.span_id:016x}",
        "parent": None if parent is None else f"{parent.span_id:016x}",
        "start_s": span.start_time / 1e9,
        "end_s": span.end_time / 1e9,
        "attributes": dict(span.attributes or {}),
    }
    if not span.status.is_ok and span.status.description:
        row["error"] = span.status.description
    return row


def point_rows(data: Any) -> list[dict[str, Any]]:
    """All points of one collection, one JSON object each."""
    rows = []
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    row = {"name": metric.name, "unit": metric.unit, "at_s": point.time_unix_nano / 1e9}
                    row["attributes"] = dict(point.attributes or {})
                    if hasattr(point, "bucket_counts"):
                        row |= {"count": point.count, "sum": point.sum, "min": point.min, "max": point.max}
                    else:
                        row["value"] = point.value
                    rows.append(row)
    return rows
