"""Measures on this machine what the planner predicts: paired runs of the default job in wall-clock time.

    uv run python integration/benchmarks/bench_effects.py [--seeds 3] [--steps 14] [--json FILE]

Each run is `pearl-rl train` with the learning rate 0, so that the workload stays the same. Printed are:

- how well the refit recovers the paced A, b and t_prefill, which the planner is not told;
- the predicted against the measured step time;
- for each pair of runs the predicted and the measured speed-up.

A step's predicted time comes from the model as it was fitted in that same run before the step; steps before the first
fit are left out. "Foreseen" is what the planner, in the run of the chosen configuration, said of the others.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FIXED_POOL = {"availability.source": "fixed", "cluster.borrowing": "off"}
CONFIGURATIONS = ("6C", "1P5D", "2P4D", "3P3D", "4P2D")


@dataclass(frozen=True)
class Run:
    """What one run measured."""

    measured_s: list[float]
    predicted_s: list[float]
    fitted: dict[str, float]
    table: dict[str, float]
    """Configuration → makespan by the planner's last decision of the run, seconds."""

    @property
    def error(self) -> float:
        """Median of |predicted − measured| / measured."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return statistics.median(abs(p - m) / m for p, m in pairs)


def train(seed: int, steps: int, settings: dict[str, object]) -> Run:
    """Run the job in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="pearl-bench-") as scratch:
        folder = Path(scratch) / "run"
        overrides = {"run.seed": seed, "run.steps": steps, "train.learning_rate": 0.0, **settings}
        command = [sys.executable, "-m", "pearl_rl", "train", "--json", "--run-dir", str(folder)]
        for key, value in overrides.items():
            command += ["--set", f"{key}={json.dumps(value) if isinstance(value, str) else value}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        return Run(
            *_steps(folder / "decisions.jsonl"),
            fitted=_fitted(folder / "events.jsonl"),
            table=_table(folder / "decisions.jsonl"),
        )


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _steps(path: Path) -> tuple[list[float], list[float]]:
    steps = [line for line in _lines(path) if "measured_s" in line]
    return [s["measured_s"] for s in steps], [s["predicted_s"] for s in steps]


def _table(path: Path) -> dict[str, float]:
    decisions = [line["decision"] for line in _lines(path) if line.get("gate") is None and "decision" in line]
    return {c["configuration"]: c["makespan_s"] for c in decisions[-1]["candidates"]}


def _fitted(path: Path) -> dict[str, float]:
    return [line for line in _lines(path) if line["event"] == "ProfileRefitted"][-1]["platform"]


def device_constants() -> dict[str, float]:
    """What the default settings pace engines to."""
    shown = subprocess.run(
        [sys.executable, "-m", "pearl_rl", "config", "show", "--json"], capture_output=True, text=True, check=True
    )
    settings = json.loads(shown.stdout)
    device = settings.get("settings", settings)["device"]
    return {name: device[name] for name in ("decode_fixed_s", "decode_per_sequence_s", "prefill_per_token_s")}


def speedup(slow: list[Run], fast: list[Run]) -> tuple[float, float]:
    """(predicted, measured) speed-up of `fast` over `slow`: ratio of median step times, mean over seeds."""
    pairs = list(zip(slow, fast, strict=True))
    predicted = statistics.mean(statistics.median(a.predicted_s) / statistics.median(b.predicted_s) for a, b in pairs)
    measured = statistics.mean(statistics.median(a.measured_s) / statistics.median(b.measured_s) for a, b in pairs)
    return predicted, measured


def main() -> None:
    """Run all pairs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases: dict[str, dict[str, object]] = {
        "pearl, 6 workers": FIXED_POOL,
        "pearl, 2 workers": {**FIXED_POOL, "cluster.max_preemptible_gpus": 0},
        "borrowing, 2 workers": {
            "availability.source": "fixed",
            "cluster.max_preemptible_gpus": 0,
            "cluster.borrowing": "ungated",
        },
        **{
            f"static {name}": {**FIXED_POOL, "planner.policy": "static_pd", "planner.configuration": name}
            for name in CONFIGURATIONS
        },
    }
    runs: dict[str, list[Run]] = {}
    for name, settings in cases.items():
        for seed in range(args.seeds):
            run = train(seed, args.steps, settings)
            runs.setdefault(name, []).append(run)
            print(
                f"{name:<22} seed {seed}  step {statistics.median(run.measured_s):.2f} s measured, "
                f"{statistics.median(run.predicted_s):.2f} s predicted",
                flush=True,
            )
    report = {
        "refit": _refit([run for group in runs.values() for run in group]),
        "step_time": {name: statistics.median(run.error for run in group) for name, group in runs.items()},
        "speedups": _speedups(runs),
    }
    _print(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def _refit(runs: list[Run]) -> dict[str, dict[str, float]]:
    out = {}
    for name, paced in device_constants().items():
        fitted = statistics.median(run.fitted[name] for run in runs)
        out[name] = {"paced": paced, "fitted": fitted, "error": fitted / paced - 1}
    return out


def _speedups(runs: dict[str, list[Run]]) -> dict[str, dict[str, float]]:
    chosen = runs["pearl, 6 workers"]
    pairs = {
        "preemptible GPUs against none": (runs["pearl, 2 workers"], chosen),
        "borrowing on against off": (runs["pearl, 2 workers"], runs["borrowing, 2 workers"]),
        **{f"chosen against {name}": (runs[f"static {name}"], chosen) for name in CONFIGURATIONS},
    }
    out = {}
    for name, (slow, fast) in pairs.items():
        predicted, measured = speedup(slow, fast)
        out[name] = {"predicted": predicted, "measured": measured, "difference": measured - predicted}
    for name in CONFIGURATIONS:
        # What the planner said of the others before anybody ran them.
        best = [min(run.table.values()) for run in chosen]
        foreseen = statistics.mean(run.table[name] / b for run, b in zip(chosen, best, strict=True))
        out[f"chosen against {name}"]["foreseen"] = foreseen
    return out


def _print(report: dict) -> None:
    print("\nrefit                      paced      fitted     error")
    for name, row in report["refit"].items():
        print(f"{name:<24} {row['paced']:>9.6f} {row['fitted']:>10.6f} {row['error']:>+9.1%}")
    print("\nstep time                median |predicted - measured| / measured")
    for name, error in report["step_time"].items():
        print(f"{name:<24} {error:>6.1%}")
    print("\nspeed-up                        predicted  measured  difference  foreseen in the run of the chosen one")
    for name, row in report["speedups"].items():
        foreseen = f"{row['foreseen']:>8.2f}x" if "foreseen" in row else ""
        print(f"{name:<32} {row['predicted']:>8.2f}x {row['measured']:>8.2f}x {row['difference']:>+10.0%}  {foreseen}")


if __name__ == "__main__":
    main()
