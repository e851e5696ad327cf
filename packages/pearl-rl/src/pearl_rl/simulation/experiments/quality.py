"""How good the planner's choice is: over random scenarios, what it chooses and predicts beside the oracle.

A case is a model on a GPU, a workload, a budget of workers, and what ran before. One batch is simulated under that
earlier configuration; from its telemetry, as the Runtime Tracker and the fit see it, the planner predicts every
configuration of the budget and chooses. As every run begins colocated, it also knows how long a colocated step took.
The simulator shares no equation with the planner: it plays requests against measured kernels.

The oracle simulates every feasible configuration. Choices are judged by the mean makespan of three batches, the one
that telemetry saw and the two after it: the longest of a few dozen trajectories, and who met whom, make a single batch
of one configuration several percent faster or slower. Predictions are judged on the batch that was seen, under
configurations that it did not run in; on later batches they also miss what those batches will be (`wape_next`), which
no model knows: what a perfect model of the seen batch would miss there is `wape_luck`.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, median
from typing import Any, Final

from pearl_planner.decide import DecideSettings
from pearl_planner.fit import FitSettings, StepMeasurement, fit_overhead, fit_platform
from pearl_planner.roofline import platform_profile
from pearl_planner.search import CandidateSearch
from pearl_rl.simulation.batch_run import BatchOutcome, run_batch
from pearl_rl.simulation.cluster import SimulatedCluster
from pearl_rl.simulation.experiments.bench import Bench, batch_scripts
from pearl_rl.simulation.experiments.targets import TargetRow
from pearl_rl.simulation.oracle import best, configurations, simulated_makespans
from pearl_rl.simulation.scenario import Scenario, scenario_from
from pearl_rl.simulation.workload import Script
from pearl_state.configuration import Configuration
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode
from pearl_state.samples import TurnSample
from pearl_telemetry.tracker import RuntimeTracker

CASES: Final = 500
_NEXT: Final = 2
_GROUP: Final = 8

_NO_LOSS: Final[Mapping[str, float]] = {
    "moved_fraction": 0.0,
    "pair_moved_fraction": 0.0,
    "renewed_fraction": 0.0,
    "shared_tokens": 0.0,
}
_NO_PATH: Final[Mapping[str, Any]] = {
    "active_by_turn": (),
    "context_by_turn": (),
    "mean_turns": 0.0,
    "slowest_turns": 0.0,
}
WITHOUT: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "closed cycle": ({"turn_environment_s": 0.0}, {}),
    "lost and shared prefixes": (_NO_LOSS, {}),
    "prefix capacity": ({}, {"prefix_capacity_tokens": 0.0}),
    "contexts that grow": ({"context_by_turn": ()}, {"decode_per_context_token_s": 0.0}),
    "turns of the slowest by number": ({"slowest_turns": 0.0}, {}),
    "work apart from path": (_NO_PATH, {}),
    "responses prefilled again": ({"retained_tokens": 0.0}, {}),
}
"""An extension → the data of (workload, platform) whose absence switches it off. The refit of costs is one more."""
EXTENDED, PRINTED, NO_REFIT = "extended", "printed", "refit of costs"


@dataclass(frozen=True, slots=True)
class Case:
    """One random scenario."""

    scenario: Scenario
    workers: int
    before: str
    """Configuration under which telemetry was gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One model's answer in one case."""

    chosen: str
    oracle: str
    """The fastest configuration that this model deems feasible."""
    regret: float
    """Simulated makespan of the choice over the oracle's, less 1."""
    regret_of_all: float
    """The same over the fastest of all, the capacity constraints set aside."""
    predicted_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A case, judged."""

    case: Case
    seen_s: Mapping[str, float]
    """Simulated makespan of the batch that telemetry saw, under each configuration, seconds."""
    later_s: Mapping[str, float]
    """Mean of the batches after it."""
    scores: Mapping[str, Score]
    """By model: `extended`, `printed`, and the extended one without each extension."""


def draw(seed: int, parameters: str = "paper") -> Case:
    """A random case, with the engines of a parameter set; the same seed gives the same one."""
    rng = random.Random(f"quality/{seed}")

    def scale(low: float, high: float) -> float:
        return round(low * math.exp(rng.random() * math.log(high / low)), 4)

    model = rng.choice(("qwen3-8b", "qwen3-8b", "qwen3-30b-a3b"))
    workers = rng.randint(2, 8)
    before = Configuration(colocated=workers)
    if rng.random() < 0.5:
        prefill = rng.randint(1, workers - 1)
        before = Configuration(prefill, workers - prefill)
    scenario = scenario_from(
        {
            "name": f"quality-{seed}",
            "model": model,
            "gpu": rng.choice(("h800", "h100", "a100")),
            "tp": rng.choice((1, 2)) if model == "qwen3-8b" else 2,
            "parameters": parameters,
            "cluster": {"training_gpus": 2, "reserved_rollout_gpus": 2, "max_preemptible_gpus": 0},
            "availability": {"trace": "none"},
            "rollout": {"batch": _GROUP * rng.randint(2, 6), "group_size": _GROUP},
            "workload": {
                "model": rng.choice(("swe", "webshop", "weka")),
                "max_context_tokens": 32_768,
                "max_turns": rng.randint(6, 14),
                "turns_scale": scale(0.3, 1.2),
                "turns_spread": 1.0,
                "first_prompt_scale": scale(0.1, 0.5),
                "prompt_scale": scale(0.4, 2.5),
                "response_scale": scale(0.5, 4.0),
                "tool_scale": scale(0.01, 0.5),
                "retained_fraction": rng.choice((1.0, 1.0, 0.3)),
                "stable_fraction": rng.choice((1.0, 1.0, 0.9, 0.0)),
            },
            "run": {"seed": seed},
        }
    )
    return Case(scenario, workers, str(before))


@dataclass(frozen=True, slots=True)
class QualityJob:
    """One case, to be simulated and judged."""

    case: Case

    def run(self) -> CaseResult:
        """See `bench.Job`."""
        return judge(self.case)


@lru_cache(maxsize=1)
def _cluster(scenario: Scenario) -> SimulatedCluster:
    return SimulatedCluster(scenario)


def judge(case: Case) -> CaseResult:
    """Simulate, predict, choose, and compare."""
    cluster = _cluster(case.scenario)
    model, stable = cluster.worker_model(), cluster.workload.stable_fraction
    seen, *following = batch_scripts(cluster, 1 + _NEXT)
    before = Configuration.parse(case.before)
    outcome = run_batch(seen, before, model, stable_fraction=stable)
    candidates = configurations(case.workers)
    seen_s = simulated_makespans([seen], candidates, model, stable_fraction=stable)
    later_s = simulated_makespans(following, candidates, model, stable_fraction=stable)
    mean_s = {c: (seen_s[c] + _NEXT * later_s[c]) / (1 + _NEXT) for c in candidates}
    scores = {}
    first = Configuration(colocated=case.workers)
    steps = [StepMeasurement(segments=((c, seen_s[c]),)) for c in {first: None, before: None}]
    workload, platform = telemetry(cluster, seen, before, outcome)
    for name, (w, p, printed) in _profiles(workload, platform, steps).items():
        settings = DecideSettings(model="printed" if printed else "extended")
        search = CandidateSearch(w, p, case.workers, settings, frozenset(Mode))
        chosen = search.ranked()[0].configuration
        feasible = [c for c in candidates if search.candidate(c.prefill).feasible] or candidates
        oracle = best({c: mean_s[c] for c in feasible})
        scores[name] = Score(
            chosen=str(chosen),
            oracle=str(oracle),
            regret=mean_s[chosen] / mean_s[oracle] - 1.0,
            regret_of_all=mean_s[chosen] / min(mean_s.values()) - 1.0,
            predicted_s={str(c): search.terms(c).total_s for c in candidates},
        )
    return CaseResult(
        case=case,
        seen_s={str(c): seconds for c, seconds in seen_s.items()},
        later_s={str(c): seconds for c, seconds in later_s.items()},
        scores=scores,
    )


# ---- telemetry ------------------------------------------------------------------------------------------------------


def telemetry(
    cluster: SimulatedCluster, scripts: Sequence[Script], before: Configuration, outcome: BatchOutcome
) -> tuple[WorkloadProfile, PlatformProfile]:
    """What the planner knows after one step, but for what steps leave over."""
    tracker = RuntimeTracker()
    for script, duration_s, found in zip(scripts, outcome.durations_s, outcome.cached_by_turn, strict=True):
        tracker.observe_turns(_turns(script, duration_s, found))
    workers = before.prefill or before.colocated
    tracker.finish_step(
        step=0,
        batch=len(scripts),
        makespan_s=outcome.makespan_s,
        decoding_fraction=_decoding_fraction(outcome),
        paired=before.prefill > 0,
        moved=outcome.moved_tokens / outcome.kept_tokens if outcome.kept_tokens else None,
        choice=1.0 - 1.0 / workers,
    )
    workload = tracker.profile()
    assert workload is not None
    scenario = cluster.scenario
    prior = platform_profile(cluster.model, cluster.gpu, scenario.tp, context_tokens=workload.context_tokens)
    room = float(cluster.limits.kv_tokens)
    prior = replace(prior, kv_capacity_bytes=room * cluster.kv_bytes, prefix_capacity_tokens=room)
    samples = outcome.samples
    fit = fit_platform(
        decode=[sample for engine in samples for sample in engine.decode],
        prefill=[sample for engine in samples for sample in engine.prefill],
        transfer=[sample for engine in samples for sample in engine.transfer],
        prior=prior,
    )
    return workload, fit.profile


def _turns(script: Script, duration_s: float, found: Sequence[int]) -> list[TurnSample]:
    """The turns of a trajectory; how its time divides is told only as far as the tracker asks: which was slowest."""
    tools = sum(turn.tool_s for turn in script.turns)
    share = max(0.0, duration_s - tools) / len(script.turns)
    turns, context = [], 0
    for number, (turn, cached) in enumerate(zip(script.turns, found, strict=True)):
        context += turn.prompt_tokens
        last = number == len(script.turns) - 1
        turns.append(
            TurnSample(
                step=0,
                turn=number,
                new_prompt_tokens=turn.prompt_tokens,
                response_tokens=turn.response_tokens,
                retained_tokens=0 if last else turn.retained_tokens,
                context_tokens=context,
                prefill_s=0.0,
                decode_s=share,
                queue_s=0.0,
                environment_s=turn.tool_s,
                last=last,
                cached_tokens=min(cached, context),
            )
        )
        context += turn.retained_tokens
    return turns


def _decoding_fraction(outcome: BatchOutcome) -> float | None:
    """f: sequence seconds in decode over trajectory seconds."""
    decoding = sum(size * seconds for size, (_, seconds) in outcome.decode_by_batch.items())
    flying = sum(outcome.durations_s)
    return min(1.0, decoding / flying) if flying and decoding else None


def _profiles(
    workload: WorkloadProfile, platform: PlatformProfile, steps: Sequence[StepMeasurement]
) -> dict[str, tuple[WorkloadProfile, PlatformProfile, bool]]:
    """Model → what it is given, and whether it is the printed one."""

    def refitted(w: WorkloadProfile, p: PlatformProfile, *, extended: bool = True) -> PlatformProfile:
        settings = FitSettings(least_steps=1)
        return fit_overhead(steps, workload=w, platform=p, extended=extended, settings=settings).profile

    given = {
        EXTENDED: (workload, refitted(workload, platform), False),
        PRINTED: (workload, refitted(workload, platform, extended=False), True),
        f"without {NO_REFIT}": (workload, platform, False),
    }
    for name, (less, fewer) in WITHOUT.items():
        w, p = replace(workload, **less), replace(platform, **fewer)
        given[f"without {name}"] = (w, refitted(w, p), False)
    return given


# ---- summary --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One model over all cases."""

    model: str
    cases: int
    within_2: float
    """Part of the cases in which its choice is within 2 % of the oracle's makespan."""
    within_10: float
    mean_regret: float
    worst_regret: float
    wape: float
    """Σ|predicted − simulated| / Σ simulated over the chosen configurations, on the batch that was seen."""
    wape_all: float
    """The same over all configurations."""
    wape_next: float
    """As `wape`, on the batches after it."""
    wape_luck: float
    """What a perfect model of the seen batch would miss there."""
    median_error: float
    """Median |predicted/simulated − 1| over all configurations, on the batch that was seen."""


def summarize(results: Sequence[CaseResult]) -> list[Quality]:
    """A row for each model, in the order of the scores. Raises `ValueError` without a result."""
    if not results:
        raise ValueError("no case was judged")
    return [_quality(name, results) for name in results[0].scores]


def _quality(name: str, results: Sequence[CaseResult]) -> Quality:
    scores = [(result, result.scores[name]) for result in results]
    regrets = [score.regret for _, score in scores]
    pairs = [(score.predicted_s[c], s) for result, score in scores for c, s in result.seen_s.items()]

    def chosen(of: Callable[[CaseResult], Mapping[str, float]]) -> list[float]:
        return [of(result)[score.chosen] for result, score in scores]

    predicted = [score.predicted_s[score.chosen] for _, score in scores]
    seen, later = chosen(lambda r: r.seen_s), chosen(lambda r: r.later_s)
    return Quality(
        model=name,
        cases=len(results),
        within_2=fmean(regret <= 0.02 for regret in regrets),
        within_10=fmean(regret <= 0.10 for regret in regrets),
        mean_regret=fmean(regrets),
        worst_regret=max(regrets),
        wape=_wape(zip(predicted, seen, strict=True)),
        wape_all=_wape(pairs),
        wape_next=_wape(zip(predicted, later, strict=True)),
        wape_luck=_wape(zip(seen, later, strict=True)),
        median_error=median(abs(p / s - 1.0) for p, s in pairs),
    )


def _wape(pairs: Iterable[tuple[float, float]]) -> float:
    known = list(pairs)
    return sum(abs(predicted - simulated) for predicted, simulated in known) / sum(simulated for _, simulated in known)


def rows(bench: Bench, *, quick: bool) -> Iterable[TargetRow]:
    """The demands on the planner as rows of a reproduction."""
    jobs = [QualityJob(draw(seed)) for seed in range(2 if quick else CASES)]
    bench.prepare(jobs)
    extended = summarize([bench.result(job) for job in jobs])[0]
    yield TargetRow(
        id="Q",
        name="choices within 2 % of the oracle",
        use="predict",
        paper=0.90,
        ours=extended.within_2,
        at_least=True,
    )
    yield TargetRow(
        id="Q",
        name="choices within 10 % of the oracle",
        use="predict",
        paper=0.99,
        ours=extended.within_10,
        at_least=True,
    )
    yield TargetRow(
        id="Q",
        name="1 - WAPE of the predicted makespan",
        use="predict",
        paper=0.90,
        ours=1.0 - extended.wape,
        at_least=True,
    )


__all__ = ["Case", "CaseResult", "Quality", "QualityJob", "draw", "judge", "rows", "summarize"]
