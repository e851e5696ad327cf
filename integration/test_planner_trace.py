"""The planner's service and a collector, each in a process of its own: answers are part of the caller's trace."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from pearl_telemetry.context import TraceKeys

COLLECTOR = Path(__file__).parents[1] / "packages" / "pearl-telemetry" / "tests" / "otlp_collector.py"
SERVE = [sys.executable, "-m", "pearl_planner", "serve", "--model", "qwen3-8b", "--gpu", "h800", "--port", "0"]
SPANS = ["--spans", "pearl_telemetry.remote:open_planner_spans"]


def test_an_answer_is_part_of_the_trace_of_whoever_asked():
    pytest.importorskip("opentelemetry.sdk")
    with subprocess.Popen(
        [sys.executable, str(COLLECTOR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as collector:
        endpoint = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
        planner = subprocess.Popen(
            [*SERVE, *SPANS],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
        )
        caller = TraceKeys.fresh()
        try:
            url = re.search(r"http://\S+", planner.stdout.readline())[0]
            for headers in ({"traceparent": caller.traceparent}, {}):
                asked = urllib.request.Request(f"{url}/v1/choose", json.dumps({"workers": 4}).encode(), headers)
                with urllib.request.urlopen(asked, timeout=30) as answer:
                    assert json.load(answer)["selected"]
        finally:
            planner.send_signal(signal.SIGTERM)
            planner.communicate(timeout=30)
            assert planner.returncode == 0
        out, _ = collector.communicate(timeout=30)
    (span,) = json.loads(out)["spans"]
    assert (span["name"], span["attributes"]["pearl.op"]) == ("pearl.planner.request", "/v1/choose")
    assert (span["trace"], span["parent"]) == (f"{caller.trace:032x}", f"{caller.span:016x}")


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ("pearl_telemetry.remote:open_planner_spans", "set OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("nothing", "is not like module:function"),
        ("no_such_module:open", "No module named"),
    ],
)
def test_spans_that_cannot_be_opened_are_one_line(spans, says):
    done = subprocess.run([*SERVE, "--spans", spans], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr
