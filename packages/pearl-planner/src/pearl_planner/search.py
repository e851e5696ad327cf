"""The candidates of one budget: which there are, which are feasible, and which is best.

A budget of N workers has N candidates. Few of them are all listed; of many the best is found by bisection, since
the makespan falls and then rises with N_P and both capacity constraints bound N_P by an interval.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pearl_planner.capacity import least_decode_workers, prefill_overload
from pearl_planner.extended import ExtendedModel
from pearl_planner.makespan import MakespanModel, PrintedModel
from pearl_planner.steady import deciding_model
from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Constraint, MakespanTerms
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideSettings:
    """Knobs of the PD Decision Engine."""

    model: Literal["extended", "printed"] = "extended"
    """Which makespan model decides; both are shown."""
    ratio_threshold: float = 0.05
    """Relative gain that a change within one mode needs."""
    mode_threshold: float = 0.10
    """Relative gain that a switch between colocation and disaggregation needs; larger, since it costs more."""
    prefill_load_limit: float = 2.0
    """Largest quotient of prefill path and decode path (see `capacity.prefill_overload`)."""
    kv_headroom: float = 1.0
    """Factor on K_seq in the KV constraint."""
    explain: int = 16
    """Candidates that a decision keeps where there are more than `explain_all_up_to` workers."""
    explain_all_up_to: int = 64
    """Largest budget, in workers, whose candidates are all kept."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a threshold or limit that is not a number in its range."""
        if self.model not in ("extended", "printed"):
            raise ValueError(f"DecideSettings.model = {self.model!r}: must be 'extended' or 'printed'")
        for name in ("ratio_threshold", "mode_threshold"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"DecideSettings.{name} = {getattr(self, name)}: must be at least 0 and below 1")
        for name in ("prefill_load_limit", "kv_headroom", "explain"):
            if not getattr(self, name) > 0:
                raise ValueError(f"DecideSettings.{name} = {getattr(self, name)}: must be above 0")
        if self.mode_threshold < self.ratio_threshold:
            raise ValueError(
                f"DecideSettings.mode_threshold = {self.mode_threshold} is below "
                f"ratio_threshold = {self.ratio_threshold}: a mode switch costs more"
            )


_BEGINNING = 3
"""Numbers of prefill workers at the beginning of a range whose makespans are compared one by one."""


@lru_cache(maxsize=4096)
def _colocated(workers: int) -> Configuration:
    return Configuration(colocated=workers)


@lru_cache(maxsize=16384)
def _disaggregated(prefill: int, decode: int) -> Configuration:
    return Configuration(prefill=prefill, decode=decode)


def rank(candidate: Candidate) -> tuple[int, float, int]:
    """Feasible first (fewest broken constraints), then fastest; ties: colocation, then fewest prefill workers."""
    return len(candidate.violated), candidate.predicted.total_s, candidate.configuration.prefill


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Smallest x in [low, high] for which the monotone `holds` is true; high + 1 where it never is."""
    while low <= high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle - 1
        else:
            low = middle + 1
    return low


class CandidateSearch:
    """The candidates of one budget. N_P = 0 stands for colocation."""

    def __init__(
        self,
        workload: WorkloadProfile,
        platform: PlatformProfile,
        workers: int,
        settings: DecideSettings,
        allowed: Collection[Mode],
    ) -> None:
        self.workers = workers
        self.settings = settings
        self.printed = PrintedModel(workload, platform)
        self.model: MakespanModel = self.printed
        self.steady = workload.steady and settings.model == "extended"
        if settings.model == "extended":
            model = deciding_model(workload, platform, settings.kv_headroom)
            if not (isinstance(model, ExtendedModel) and model.is_printed):
                self.model = model
        # One worker cannot hold two roles of which each needs the other.
        self.colocation = Mode.COLOCATION in allowed or workers == 1
        self.disaggregation = Mode.DISAGGREGATION in allowed and workers >= 2
        # Under a steady load who finds no room waits outside, and whoever would pile up is in the cycle already:
        # nothing is infeasible, it only serves fewer at a time.
        self.least_decode = 1 if self.steady else least_decode_workers(workload, platform, settings.kv_headroom)
        self.step_error = platform.step_error if settings.model == "extended" else 0.0
        self.context_prefill_s = workload.batch * workload.context_tokens * platform.prefill_per_token_s
        self.low, self.high = 1, 0
        self._known: dict[int, Candidate] = {}
        if self.disaggregation:
            heavy = not self.steady and self._overloaded(1)
            self.low = _first(1, workers - 1, lambda p: not self._overloaded(p)) if heavy else 1
            self.high = min(workers - 1, workers - self.least_decode)

    @property
    def considered(self) -> int:
        """How many candidates there are."""
        return int(self.colocation) + (self.workers - 1 if self.disaggregation else 0)

    def _overloaded(self, prefill: int) -> bool:
        first, second = self.model.paths(prefill, self.workers - prefill)
        return prefill_overload(first, second, self.settings.prefill_load_limit)

    def _total(self, prefill: int) -> float:
        return self.model.total_s(prefill, self.workers - prefill)

    def _best_within(self, low: int, high: int) -> int:
        """Minimum over N_P in [low, high] of the makespan; of equals the smallest N_P.

        It falls and then rises with N_P, but for its very beginning: one prefill worker alone keeps every prefix, two
        of them take trajectories from each other. So the first few are looked at one by one, and all where they are all
        listed anyway.
        """
        if self.workers <= self.settings.explain_all_up_to:
            return min(range(low, high + 1), key=lambda p: self.candidate(p).predicted.total_s)
        total, workers = self.model.total_s, self.workers
        begin = min(high, low + _BEGINNING)
        found = _first(begin, high - 1, lambda p: total(p, workers - p) <= total(p + 1, workers - p - 1))
        best: int = min((*range(low, begin), found), key=self._total)
        return best

    def _violated(self, prefill: int) -> tuple[Constraint, ...]:
        heavy, full = prefill < self.low, prefill > self.high
        if heavy:
            return (Constraint.PREFILL_LOAD, Constraint.DECODE_KV) if full else (Constraint.PREFILL_LOAD,)
        return (Constraint.DECODE_KV,) if full else ()

    def terms(self, configuration: Configuration) -> MakespanTerms:
        """The deciding model's prediction for any configuration that is not empty, of this budget or another."""
        if configuration.prefill:
            return self.model.disaggregated(configuration.prefill, configuration.decode)
        return self.model.colocated(configuration.colocated)

    def candidate(self, prefill: int) -> Candidate:
        """The candidate with N_P = `prefill`; colocation where that is 0."""
        known = self._known.get(prefill)
        if known is None:
            known = self._known[prefill] = self._candidate(prefill)
        return known

    def _candidate(self, prefill: int) -> Candidate:
        workers, model, printed = self.workers, self.model, self.printed
        if prefill == 0:
            predicted = model.colocated(workers)
            return Candidate(
                configuration=_colocated(workers),
                predicted=predicted,
                printed=predicted if model is printed else printed.colocated(workers),
                feasible=True,
            )
        decode = workers - prefill
        predicted = model.disaggregated(prefill, decode)
        violated = () if self.low <= prefill <= self.high else self._violated(prefill)
        return Candidate(
            configuration=_disaggregated(prefill, decode),
            predicted=predicted,
            printed=predicted if model is printed else printed.disaggregated(prefill, decode),
            feasible=not violated,
            violated=violated,
        )

    def best_disaggregated(self) -> int:
        """N_P of the best disaggregated candidate, by `rank`; there must be one."""
        if self.low <= self.high:
            return self._best_within(self.low, self.high)
        # None is feasible: from `low` on only decode KV is short, up to `high` only prefill falls behind.
        last = self.workers - 1
        ranges = [(low, high) for low, high in ((self.low, last), (1, self.high)) if low <= high] or [(1, last)]
        return min((self._best_within(low, high) for low, high in ranges), key=lambda p: rank(self.candidate(p)))

    def _outward(self, start: int) -> Iterator[int]:
        """N_P from the best one outwards, always the better of the two neighbours."""
        left, right = start - 1, start + 1
        yield start
        low, high = max(1, min(self.low, start)), max(self.high, start)
        while left >= low or right <= high:
            if right > high or (left >= low and self._total(left) <= self._total(right)):
                yield left
                left -= 1
            else:
                yield right
                right += 1

    def ranked(self) -> list[Candidate]:
        """All candidates by rank; only the best few for a large budget."""
        found = [self.candidate(0)] if self.colocation else []
        if self.disaggregation:
            if self.workers <= self.settings.explain_all_up_to:
                found += [self.candidate(p) for p in range(1, self.workers)]
            else:
                walk = self._outward(self.best_disaggregated())
                found += [self.candidate(p) for p, _ in zip(walk, range(self.settings.explain), strict=False)]
        found.sort(key=rank)
        return found

    def nearest(self, current: Configuration) -> Candidate | None:
        """The best feasible candidate that `current` reaches by joins or departures alone; None: there is none."""
        if current.mode is Mode.COLOCATION:
            return self.candidate(0) if self.colocation and current.workers else None
        if not self.disaggregation:
            return None
        ends = current.prefill, self.workers - current.decode
        low, high = max(min(ends), self.low), min(max(ends), self.high)
        return self.candidate(self._best_within(low, high)) if low <= high else None

    def limits(self, ranked: list[Candidate]) -> list[str]:
        """In words: what the constraints removed, and which of them decided against the fastest candidate."""
        if not self.disaggregation:
            return ["one worker cannot be split into prefill and decode"] if self.workers == 1 else []
        words = []
        last = self.workers - 1
        if self.high < last:
            words.append(f"decode_kv: the batch's KV needs N_D >= {self.least_decode}, so N_P <= {max(0, self.high)}")
        if self.low > 1:
            words.append(f"prefill_load: fewer than {self.low} prefill workers fall behind decode")
        if words:
            fastest, best = self._fastest_infeasible(ranked), ranked[0]
            if fastest is not None and best.feasible and fastest.makespan_s < best.makespan_s:
                words.append(
                    f"{' and '.join(fastest.violated)} decided: {fastest.configuration} would take "
                    f"{fastest.makespan_s:.1f} s, {best.configuration} takes {best.makespan_s:.1f} s"
                )
        return words

    def _fastest_infeasible(self, ranked: list[Candidate]) -> Candidate | None:
        if len(ranked) == self.considered:
            broken = [c for c in ranked if not c.feasible]
            return min(broken, key=lambda c: c.predicted.total_s) if broken else None
        free = self.candidate(self._best_within(1, self.workers - 1))
        return None if free.feasible else free
