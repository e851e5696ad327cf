"""An OTLP/HTTP collector as a process of its own: decodes with the official messages and tells what it received.

It prints its port, takes requests until its standard input ends, then prints one JSON object and exits.
"""

import gzip
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

received: dict[str, Any] = {"spans": [], "metrics": {}, "logs": [], "refused": []}


def plain(value: Any) -> Any:
    """An attribute's value."""
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


def attributes(listed: Any) -> dict[str, Any]:
    """Key → value."""
    return {item.key: plain(item.value) for item in listed}


def take_spans(body: bytes) -> bytes:
    """Note every span."""
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                received["spans"].append(
                    {
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "span": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "start_ns": span.start_time_unix_nano,
                        "end_ns": span.end_time_unix_nano,
                        "error": span.status.message,
                        "attributes": attributes(span.attributes),
                        "resource": about,
                    }
                )
    return ExportTraceServiceResponse().SerializeToString()


def take_metrics(body: bytes) -> bytes:
    """Note each metric's unit, kind and attribute names."""
    for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                points = getattr(metric, kind).data_points
                names = sorted({item.key for point in points for item in point.attributes})
                received["metrics"][metric.name] = {"unit": metric.unit, "kind": kind, "attributes": names}
    return ExportMetricsServiceResponse().SerializeToString()


def take_logs(body: bytes) -> bytes:
    """Note every log record."""
    for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
        for scope in resource.scope_logs:
            for record in scope.log_records:
                received["logs"].append(
                    {
                        "text": record.body.string_value,
                        "level": record.severity_text,
                        "severity": record.severity_number,
                        "trace": record.trace_id.hex(),
                        "span": record.span_id.hex(),
                        "attributes": attributes(record.attributes),
                    }
                )
    return ExportLogsServiceResponse().SerializeToString()


class Handler(BaseHTTPRequestHandler):
    """OTLP/HTTP with binary protobuf."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        take = {"/v1/traces": take_spans, "/v1/metrics": take_metrics, "/v1/logs": take_logs}.get(self.path)
        if take is None or self.headers["Content-Type"] != "application/x-protobuf":
            received["refused"].append(f"{self.path} {self.headers['Content-Type']}")
            self.send_error(404)
            return
        answer = take(body)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        return


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        server.shutdown()
        thread.join()
    print(json.dumps(received))


if __name__ == "__main__":
    main()
