"""How good the planner's choices and predictions are: `python integration/benchmarks/bench_quality.py`.

Random scenarios, each simulated under every configuration of its budget; what the planner chose and predicted after
the telemetry of one step beside it. Printed are the paper's equations, the extended model, and the extended model
without each of its parts. About a second a case on one core.

    uv run python integration/benchmarks/bench_quality.py --cases 40 --jobs 2
"""

import argparse
import json
import sys
from dataclasses import asdict

from pearl_rl.errors import SettingsError
from pearl_rl.simulation.experiments.bench import Bench
from pearl_rl.simulation.experiments.quality import CASES, Quality, QualityJob, draw, summarize
from pearl_rl.simulation.parameters import load_parameters


def table(rows: list[Quality]) -> str:
    """The rows as text; a part's own share is the difference to the first row."""
    names = ("mean", "worst", "WAPE", "of all", "next", "luck")
    lines = [f"{'model':<34} {'<= 2 %':>7} {'<= 10 %':>8} " + " ".join(f"{name:>7}" for name in names)]
    lines += [
        f"{row.model:<34} {row.within_2:>7.1%} {row.within_10:>8.1%} {row.mean_regret:>7.2%} {row.worst_regret:>7.1%} "
        f"{row.wape:>7.1%} {row.wape_all:>7.1%} {row.wape_next:>7.1%} {row.wape_luck:>7.1%}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES, help="scenarios (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first scenario (default: %(default)s)")
    parser.add_argument(
        "--parameters", default="paper", help="parameter set, like roll-sglang: its engines (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    arguments = parser.parse_args()
    if arguments.cases < 1 or arguments.jobs < 1:
        parser.error("--cases and --jobs must be at least 1")
    try:
        load_parameters(arguments.parameters, "qwen3-8b")
    except SettingsError as error:
        parser.error(str(error))

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {of} scenarios", end="" if done < of else "\r\033[K", file=sys.stderr, flush=True)

    bench = Bench(arguments.jobs, progress)
    seeds = range(arguments.first, arguments.first + arguments.cases)
    jobs = [QualityJob(draw(seed, arguments.parameters)) for seed in seeds]
    bench.prepare(jobs)
    rows = summarize([bench.result(job) for job in jobs])
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
