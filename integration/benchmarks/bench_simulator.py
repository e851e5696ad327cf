"""How fast the simulator is on one core: `python integration/benchmarks/bench_simulator.py [NAME…] [--json]`.

- `segment`: two hours of the paper's cluster under PEARL (borrowing, preemption, ratios).
- `pairs`: agentic turns per second under disaggregation, with a small KV budget (eviction), transfers and tool pauses.
- `hyperscale`: one step on 10,000 GPUs with 100,000 live trajectories.
- `flat`: cost per turn of that cluster at one, two and four tenths of its size.
- `week`, `month`: memory after a simulated day and at the end, of the paper's segment at batches of 64. Not run unless
  named: a simulated week takes six minutes of processor time, a month half an hour.

Prints processor time, since other work on the machine only ever adds waiting. All but the first two take minutes.
"""

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence

from pearl_rl.simulation.cluster import simulate
from pearl_rl.simulation.outcome import SimulationResult
from pearl_rl.simulation.scenario import load_scenario

DAY_S = 86_400.0
Figures = dict[str, float]


def timed(source: str, *overrides: str) -> tuple[SimulationResult, Figures]:
    """Run a scenario: its result, and seconds, turns and turns per second."""
    gc.collect()
    began_s = time.process_time()
    result = simulate(load_scenario(source, overrides))
    took_s = time.process_time() - began_s
    turns = result.counts.turns
    return result, {"seconds": took_s, "turns": turns, "turns_per_s": turns / took_s}


def peak_mb() -> float:
    """The most memory that this process ever had, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def segment() -> Figures:
    """Two hours of segment 2."""
    return timed("paper-segment2", "policy.name=pearl")[1]


def pairs() -> Figures:
    """Long contexts on few workers, so that prefixes give way."""
    result, figures = timed(
        "weka", "policy.name=pearl-disaggregated", "availability.trace=none", "run.steps=2", "workload.max_turns=40"
    )
    return {
        **figures,
        "transferred_gb": result.engines.transferred_bytes / 1e9,
        "found_share": result.engines.cached_tokens / (result.engines.cached_tokens + result.engines.prefill_tokens),
    }


def hyperscale() -> Figures:
    """One step of the largest scenario."""
    _, figures = timed("hyperscale")
    return {**figures, "peak_mb": peak_mb()}


def flat() -> Figures:
    """Cost per turn against the size of the cluster."""
    costs: Figures = {}
    for tenths in (1, 2, 4):
        sizes = {"training_gpus": 200, "reserved_rollout_gpus": 800}
        cluster = [f"cluster.{name}={tenths * gpus}" for name, gpus in sizes.items()]
        _, figures = timed("hyperscale", *cluster, f"rollout.batch={tenths * 10_000 // 16 * 16}")
        costs[f"us_per_turn_{tenths}000_gpus"] = 1e6 / figures["turns_per_s"]
    return costs


def week() -> Figures:
    """Memory over seven days."""
    return memory_over(7)


def month() -> Figures:
    """Memory over thirty days."""
    return memory_over(30)


def memory_over(days: int) -> Figures:
    """Memory of one long run, seen from inside it, after the first day and after the last.

    `_mb` is the peak so far, which is that of the batch with the most turns yet. `_blocks` are the fewest blocks of
    memory that were allocated at any time of the second half of the day: what no batch holds. Nobody looks for garbage
    before, which would hide what a user's run holds.
    """
    scenario = load_scenario(
        "paper-segment2", ("policy.name=pearl", "rollout.batch=64", f"run.duration_s={days * DAY_S}")
    )
    fewest: dict[int, int] = {}
    peaks_mb: dict[int, float] = {}

    def look(part: float) -> None:
        day, time_of_day = divmod(part * days, 1.0)
        peaks_mb[int(day)] = peak_mb()
        if time_of_day >= 0.5:
            fewest[int(day)] = min(sys.getallocatedblocks(), fewest.get(int(day), sys.maxsize))

    began_s = time.process_time()
    result = simulate(scenario, on_progress=look)
    first = sum(step.now_s <= DAY_S for step in result.steps)
    return {
        "seconds": time.process_time() - began_s,
        "days": result.elapsed_s / DAY_S,
        "steps": len(result.steps),
        "turns": result.counts.turns,
        "day_mb": peaks_mb[0],
        "end_mb": peak_mb(),
        "day_blocks": fewest[0],
        "end_blocks": fewest[days - 1],
        "blocks_per_step": (fewest[days - 1] - fewest[0]) / (len(result.steps) - first),
    }


BENCHMARKS: dict[str, Callable[[], Figures]] = {
    function.__name__: function for function in (segment, pairs, hyperscale, flat, week, month)
}
LONG = ("week", "month")
"""Run only where they are named."""


def main(names: Sequence[str], *, as_json: bool) -> None:
    """Run the benchmarks and print what they measured."""
    found: dict[str, Figures] = {}
    for name in names or [name for name in BENCHMARKS if name not in LONG]:
        found[name] = BENCHMARKS[name]()
        if not as_json:
            print(f"{name}: " + ", ".join(f"{key} {value:,.4g}" for key, value in found[name].items()), flush=True)
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}; default: all but {', '.join(LONG)}"
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="one JSON object")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"no benchmark {unknown[0]}: use some of {', '.join(BENCHMARKS)}")
    main(arguments.names, as_json=arguments.as_json)
