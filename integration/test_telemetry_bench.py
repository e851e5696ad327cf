"""The benchmark of telemetry: what it takes away is all there is, and what it says of pairs is their difference."""

import inspect

from benchmarks import bench_telemetry as bench
from pearl_executor.runtimes.local import channels
from pearl_rl import compose
from pearl_rl.telemetry import RunTelemetry


def test_a_run_without_telemetry_has_every_part_of_it_that_a_run_asks_for(monkeypatch):
    monkeypatch.setattr(compose, "RunTelemetry", compose.RunTelemetry)
    monkeypatch.setattr(channels, "trace_headers", channels.trace_headers)
    bench.remove_telemetry()
    absent = compose.RunTelemetry("settings", "folder", "model", 0.0)
    asked = {name for name in vars(RunTelemetry) if not name.startswith("_")}
    assert asked <= {name for name, _ in inspect.getmembers(absent)}
    assert channels.trace_headers() == {}
    part = object()
    assert all(give(part) is part for give in (absent.recipe, absent.agent, absent.executor, absent.requests))


def run(wall_s, control_s, model_calls):
    return {"wall_s": wall_s, "control_s": control_s, "model_calls": model_calls}


def test_differences_are_those_within_pairs_with_their_interval():
    found = {"none": [run(10.0, 1.0, 100), run(10.0, 1.2, 120)], "off": [run(10.1, 1.1, 110), run(10.2, 1.1, 110)]}
    lines = bench.compared(found)
    # t of one degree of freedom × the standard error of +1 % and +2 %.
    assert lines[0] == "off against none: wall time +1.50% ± 6.36% (95 % of 2 pairs)"
    # Each call took the same 10 ms with and without, so nothing but the number of calls differs.
    (equal,) = (line for line in lines if "equal numbers of model calls" in line)
    assert "+0.00% ± 0.00%" in equal or "-0.00% ± 0.00%" in equal
    assert not any("equal numbers" in line for line in bench.compared({"none": [run(1, 1, 0)], "off": [run(1, 1, 0)]}))
