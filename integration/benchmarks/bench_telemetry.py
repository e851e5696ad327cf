"""What telemetry costs the default job on this machine: paired runs, and what one call costs times the calls of a run.

    uv run python integration/benchmarks/bench_telemetry.py [--pairs 6] [--steps 5] [--forms off on] [--json FILE]

Three forms of the same short job take turns, each in a process of its own, in an order that turns around from one
pair to the next:

- `none`: the control plane without its instruments, as if they had never been written;
- `off`: as it is shipped, with no SDK configured;
- `on`: every span and point to an OTLP collector in a process of its own, and to JSON lines.

Compared are wall time, and processor time of the control plane (threads of exporters included) over that wall time,
both from the end of the first step on. The workers are paced to an emulated device, so that wall time hides what is
small: hence the second way, which no noise of a machine reaches. It counts the calls that a run makes into telemetry,
measures each kind of call alone, and gives their product as a share of the run's wall time.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pearl_executor import tracing
from pearl_executor.calls import Action
from pearl_rl import compose
from pearl_rl.observer import Observers, SilentObserver, StepRecord
from pearl_rl.run_folder import RunFolder
from pearl_rl.settings import load_settings
from pearl_rl.telemetry import RunTelemetry
from pearl_state.worker import WorkerId
from pearl_telemetry.instruments import Instruments
from pearl_telemetry.metrics import METRICS

COLLECTOR = Path(__file__).parents[2] / "packages/pearl-telemetry/tests/otlp_collector.py"
FORMS = ("none", "off", "on")


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

    def close(self) -> None:
        """Nothing."""


class Clocks(SilentObserver):
    """Wall and processor time at the end of each step, seconds."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    def on_step(self, record: StepRecord) -> None:
        """Note both."""
        self.at.append((record.now_s, time.process_time()))


def job(form: str, steps: int, endpoint: str, folder: Path) -> dict[str, Any]:
    """Run the job once in this process, in `form`, or as shipped with its calls counted (`count`)."""
    calls: Counter[str] = Counter()
    if form == "none":
        compose.RunTelemetry = Absent  # type: ignore[misc,assignment]
    if form == "count":
        count_calls(calls)
    sent = [f"telemetry.otlp_endpoint={endpoint}", "telemetry.jsonl=true"] if form == "on" else []
    resolved = load_settings(None, [f"run.steps={steps}", "train.learning_rate=0.0", *sent])
    clocks = Clocks()
    began_s = time.monotonic()
    with RunFolder.create(resolved, folder) as run:
        asyncio.run(compose.train(resolved.settings, run, clocks))
    whole_s = time.monotonic() - began_s
    (wall_from_s, used_from_s), (wall_to_s, used_to_s) = clocks.at[0], clocks.at[-1]
    written = {}
    if form == "on":
        lines = (folder / "spans.jsonl").read_text(encoding="utf-8").splitlines()
        written = dict(Counter(json.loads(line)["name"] for line in lines))
    return {
        "wall_s": wall_to_s - wall_from_s,
        "control_s": used_to_s - used_from_s,
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
    import pearl_executor.runtimes.local.channels as channels

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


def child(form: str, steps: int, endpoint: str = "") -> dict[str, Any]:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="pearl-bench-") as scratch:
        command = [sys.executable, __file__, "--one", form, "--steps", str(steps), "--endpoint", endpoint]
        done = subprocess.run([*command, "--folder", f"{scratch}/run"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def pairs(count: int, steps: int, rest_s: float, forms: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Runs of all forms, one after the other; every second round goes backwards."""
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
                run = child(form, steps, endpoint)
                found[form].append(run)
                print(
                    f"{number + 1}/{count} {form:<5} {run['wall_s']:7.2f} s wall  {run['control_s']:6.3f} s control",
                    flush=True,
                )
        collector.stdin.close()
        collector.stdout.read()
    return found


def compared(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Differences within pairs, against the form before: median and spread."""
    lines = []
    for form, base in (("off", "none"), ("on", "off")):
        if not {form, base} <= found.keys():
            continue
        runs = list(zip(found[form], found[base], strict=True))
        wall = [a["wall_s"] / b["wall_s"] - 1 for a, b in runs]
        share = [(a["control_s"] / a["wall_s"]) - (b["control_s"] / b["wall_s"]) for a, b in runs]
        used = [a["control_s"] / b["control_s"] - 1 for a, b in runs]
        measures = (
            ("wall time", wall),
            ("control plane's processor time, of wall time", share),
            ("control plane's processor time, of its own", used),
        )
        for what, values in measures:
            spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            lines.append(
                f"{form} against {base}: {what} {statistics.mean(values):+.2%} ± {spread:.2%} (standard error)"
            )
    return lines


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
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between runs, where others want the cores too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=(*FORMS, "count"), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(job(given.one, given.steps, given.endpoint, given.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        costs = off_costs(Path(scratch))
    counted = child("count", given.steps)
    for line in counted_share(counted, costs):
        print(line)
    found = pairs(given.pairs, given.steps, given.rest, given.forms)
    for line in compared(found):
        print(line)
    print(f"spans of one run: {found['on'][-1]['spans']}")
    if given.json is not None:
        given.json.write_text(
            json.dumps({"costs": costs, "counted": counted, "runs": found}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
