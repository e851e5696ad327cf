"""What telemetry costs the default job on this machine: paired runs, and what one call costs times the calls of a run.

    uv run python integration/benchmarks/bench_telemetry.py --forms none off [--pairs 5] [--steps 8] [--json FILE]
    uv run python integration/benchmarks/bench_telemetry.py --forms off on

Each takes eight minutes on two idle cores: a pair one and a half, what comes before the first pair one. Forms of the
same short job take turns, each in a process of its own, in an order that turns around from one pair to the next:

- `none`: without instrumentation, as if it had never been written (`remove_telemetry`; no setting does this);
- `off`: as it is shipped, with no SDK configured;
- `on`: every span and point to an OTLP collector in a process of its own, and to JSON lines.

All roll out with one model that is built once, and learn nothing, so that they have the same to do. Compared are, from
the end of the first step on, wall time and processor time of the control plane (threads of exporters included), over
the wall time; the latter also at equal numbers of model calls, since a run that happens to make more of them needs more
for them. Each difference comes with its 95 % confidence interval over the pairs (Student's t). The workers are paced to
an emulated device, so that wall time hides what is small. Hence a second way as a cross-check: it counts the calls that
a run makes into telemetry, measures each kind of call alone, and gives their product as a share of the run's wall time.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pearl_executor import tracing
from pearl_executor.calls import Action
from pearl_executor.runtimes.local import channels
from pearl_rl import compose
from pearl_rl.observer import Observers, SilentObserver, StepRecord
from pearl_rl.rollout.recorded_generation import RequestRecord
from pearl_rl.run_folder import RunFolder
from pearl_rl.settings import load_settings
from pearl_rl.telemetry import RunTelemetry
from pearl_state.worker import WorkerId
from pearl_telemetry.instruments import Instruments
from pearl_telemetry.metrics import METRICS

COLLECTOR = Path(__file__).parents[2] / "packages/pearl-telemetry/tests/otlp_collector.py"
FORMS = ("none", "off", "on")


T_95: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 % on both sides, by degrees of freedom from 1 on."""


class Absent(SilentObserver):
    """A run's telemetry that does nothing at all."""

    def __init__(self, *_about: object) -> None:
        self.executor = self.agent = self.recipe = lambda part: part

    def observing(self, *others: Any) -> Observers:
        """The others alone."""
        return Observers(*others)

    def on_control(self, *_about: object) -> None:
        """Nothing."""

    on_trajectory = on_action = on_control

    def requests(self, record: Callable[[RequestRecord], None]) -> Callable[[RequestRecord], None]:
        """The run's own record alone."""
        return record

    def close(self) -> None:
        """Nothing."""


def remove_telemetry() -> None:
    """Let this process' runs have none of it: nobody is told, and no frame to a worker asks for a context."""
    compose.RunTelemetry = Absent  # type: ignore[misc,assignment]
    channels.trace_headers = dict


class Clocks(SilentObserver):
    """Wall and processor time, seconds, and model calls until then at the end of each step."""

    def __init__(self, run: RunFolder) -> None:
        self.at: list[tuple[float, float, int]] = []
        self._calls = 0
        self._record = run.record_request
        run.record_request = self._counted  # type: ignore[method-assign]

    def _counted(self, record: RequestRecord) -> None:
        self._calls += 1
        self._record(record)

    def on_step(self, record: StepRecord) -> None:
        """Note all three."""
        self.at.append((record.now_s, time.process_time(), self._calls))


def job(form: str, steps: int, endpoint: str, model: str, folder: Path) -> dict[str, Any]:
    """Run the job once in this process, in `form`, or as shipped with its calls counted (`count`)."""
    calls: Counter[str] = Counter()
    if form == "none":
        remove_telemetry()
    if form == "count":
        count_calls(calls)
    sent = [f"telemetry.otlp_endpoint={endpoint}", "telemetry.jsonl=true"] if form == "on" else []
    chosen = [f"run.steps={steps}", f"model.path={model}", "train.learning_rate=0.0"]
    resolved = load_settings(None, [*chosen, *sent])
    began_s = time.monotonic()
    with RunFolder.create(resolved, folder) as run:
        clocks = Clocks(run)
        asyncio.run(compose.train(resolved.settings, run, clocks))
    whole_s = time.monotonic() - began_s
    (wall_from_s, used_from_s, calls_from), (wall_to_s, used_to_s, calls_to) = clocks.at[0], clocks.at[-1]
    written = {}
    if form == "on":
        lines = (folder / "spans.jsonl").read_text(encoding="utf-8").splitlines()
        written = dict(Counter(json.loads(line)["name"] for line in lines))
    return {
        "wall_s": wall_to_s - wall_from_s,
        "control_s": used_to_s - used_from_s,
        "model_calls": calls_to - calls_from,
        "steps": clocks.at,
        "whole_s": whole_s,
        "spans": written,
        "calls": dict(calls),
    }


def count_calls(calls: Counter[str]) -> None:
    """Let every call into telemetry count itself."""

    def counted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return inner(*args, **options)

        setattr(owner, name, outer)

    for name in ("point", "on_table", "on_decision", "on_event", "on_step"):
        counted(Instruments, name)
    for name in ("on_action", "on_trajectory", "on_control"):
        counted(RunTelemetry, name)
    counted(channels, "trace_headers")


def off_costs(folder: Path) -> dict[str, float]:
    """Seconds of one call of each kind where no SDK is configured; those that make points are measured as points."""
    telemetry = RunTelemetry(load_settings(None, []).settings.telemetry, folder, "tiny", 0.0)
    attributes = {"pearl.action": "start", "pearl.outcome": "done"}
    table, instruments = compose.initial_state(**_state()).table, telemetry.instruments
    action = Action(name="start", worker=WorkerId(1), incarnation=1, started_s=0.0, duration_s=1.0, failed=None)
    calls: dict[str, Callable[[], object]] = {
        "point": lambda: instruments.point(METRICS.worker_action, 1.0, attributes),
        "trace_headers": tracing.trace_headers,
        "on_table": lambda: instruments.on_table(table),
        "on_action": lambda: telemetry.on_action(action),
        # Neither looks at what it is given where nobody traces.
        "on_control": lambda: telemetry.on_control(None, ()),  # type: ignore[arg-type]
        "on_trajectory": lambda: telemetry.on_trajectory(None, 1),  # type: ignore[arg-type]
    }
    found = {name: _one(call) for name, call in calls.items()}
    telemetry.close()
    return found


def _state() -> dict[str, Any]:
    from pearl_planner.elastic import ElasticSettings
    from pearl_planner.policies import pearl
    from pearl_rl import parts
    from pearl_state.profile import PlatformProfile

    return {
        "settings": ElasticSettings(policy=pearl()),
        "workload": parts.prior_workload(load_settings(None, []).settings),
        "platform": PlatformProfile(
            decode_fixed_s=0.02, decode_per_sequence_s=0.001, prefill_per_token_s=0.0005, kv_bytes_per_token=1000,
            transfer_bytes_per_s=2e8, kv_capacity_bytes=3e7,
        ),
        "training_gpus": 2,
    }  # fmt: skip


def _one(call: Callable[[], object], *, runs: int = 5, calls: int = 20_000) -> float:
    """Least time of one call over some repetitions, seconds."""
    best = float("inf")
    for _ in range(runs):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - began) / calls)
    return best


def child(form: str, steps: int, folder: Path, *, endpoint: str = "", model: str = "tiny") -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--one", form, "--steps", str(steps), "--endpoint", endpoint, "--model", model]
    done = subprocess.run([*command, "--folder", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def pairs(
    count: int, steps: int, rest_s: float, forms: Sequence[str], model: Path, scratch: Path
) -> dict[str, list[dict[str, Any]]]:
    """Runs of all forms with one model, one after the other; every second round goes backwards."""
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in forms}
    pause = threading.Event()
    with subprocess.Popen(
        [sys.executable, str(COLLECTOR)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as collector:
        assert collector.stdin is not None
        assert collector.stdout is not None
        endpoint = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
        for number in range(count):
            for form in forms if number % 2 == 0 else reversed(forms):
                pause.wait(rest_s)
                folder = scratch / f"{form}-{number}"
                run = child(form, steps, folder, endpoint=endpoint, model=str(model))
                shutil.rmtree(folder)
                found[form].append(run)
                print(
                    f"{number + 1}/{count} {form:<5} {run['wall_s']:7.2f} s wall  {run['control_s']:6.3f} s control  "
                    f"{run['model_calls']} model calls",
                    flush=True,
                )
        collector.stdin.close()
        collector.stdout.read()
    return found


def compared(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Differences within pairs, against the form before, each with its 95 % confidence interval."""
    lines = []
    for form, base in (("off", "none"), ("on", "off")):
        if not {form, base} <= found.keys():
            continue
        runs = list(zip(found[form], found[base], strict=True))
        measures = [
            ("wall time", [a["wall_s"] / b["wall_s"] - 1 for a, b in runs]),
            ("control plane's processor time, of wall time", [_share(a) - _share(b) for a, b in runs]),
            ("control plane's processor time, of its own", [a["control_s"] / b["control_s"] - 1 for a, b in runs]),
        ]
        # A run of two steps may have made all its calls by the end of the first.
        if all(run["model_calls"] for run in (*found[form], *found[base])):
            equal = [_share(a, b) - _share(b, a) for a, b in runs]
            measures.insert(2, ("the same at equal numbers of model calls", equal))
        lines += [f"{form} against {base}: {what} {interval(values)}" for what, values in measures]
    return lines


def _share(run: dict[str, Any], other: dict[str, Any] | None = None) -> float:
    """The control plane's processor time over wall time; with `other`, at the mean number of calls and wall time."""
    if other is None:
        return float(run["control_s"] / run["wall_s"])
    mean = {key: (run[key] + other[key]) / 2 for key in ("model_calls", "wall_s")}
    return float(run["control_s"] / run["model_calls"] * mean["model_calls"] / mean["wall_s"])


def interval(values: Sequence[float]) -> str:
    """Mean and half of its 95 % confidence interval, in per cent."""
    if len(values) < 2:
        return f"{statistics.mean(values):+.2%} (one pair: no interval)"
    t = T_95[min(len(values) - 1, len(T_95)) - 1]
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.2%} ± {half:.2%} (95 % of {len(values)} pairs)"


def counted_share(run: dict[str, Any], costs: dict[str, float]) -> list[str]:
    """Cost of the calls that a run with nothing configured makes, as a share of its wall time."""
    calls, lines, total_s = run["calls"], [], 0.0
    # A table and an action are measured with the points that they make.
    points = calls.get("point", 0) - 6 * calls.get("on_table", 0) - calls.get("on_action", 0)
    counted = {**{name: calls.get(name, 0) for name in costs}, "point": max(0, points)}
    for name, cost_s in costs.items():
        total_s += counted[name] * cost_s
        lines.append(f"{name:<14} {counted[name]:>7} × {cost_s * 1e6:7.3f} µs = {counted[name] * cost_s * 1e3:8.3f} ms")
    lines.append(f"off, counted: {total_s * 1e3:.2f} ms of {run['whole_s']:.1f} s: {total_s / run['whole_s']:.4%}")
    return lines


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between runs, where others want the cores too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=(*FORMS, "count"), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="tiny", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(job(given.one, given.steps, given.endpoint, given.model, given.folder)))
        return
    if given.steps < 2 or given.pairs < 1:
        parser.error("what is measured begins at the end of the first step: at least 2 steps and 1 pair")
    with tempfile.TemporaryDirectory(prefix="pearl-bench-") as folder:
        scratch = Path(folder)
        (scratch / "costs").mkdir()
        costs = off_costs(scratch / "costs")
        counted = child("count", given.steps, scratch / "count")
        for line in counted_share(counted, costs):
            print(line, flush=True)
        found = pairs(given.pairs, given.steps, given.rest, given.forms, scratch / "count/model", scratch)
    for line in compared(found):
        print(line)
    if "on" in found:
        print(f"spans of one run: {found['on'][-1]['spans']}")
    if given.json is not None:
        given.json.write_text(
            json.dumps({"costs": costs, "counted": counted, "runs": found}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
