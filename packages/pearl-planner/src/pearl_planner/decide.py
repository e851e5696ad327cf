"""The PD Decision Engine of PEARL section 4.3: enumerate, discard, compare, and switch only where it pays."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from pearl_planner.capacity import least_decode_workers, prefill_overload
from pearl_planner.extended import ExtendedModel
from pearl_planner.makespan import MakespanModel, PrintedModel
from pearl_planner.switching import Switch, SwitchCosts, switch_between
from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Constraint, Decision, Reason
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode

BOTH_MODES: Final = frozenset(Mode)


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


@lru_cache(maxsize=4096)
def _colocated(workers: int) -> Configuration:
    return Configuration(colocated=workers)


@lru_cache(maxsize=16384)
def _disaggregated(prefill: int, decode: int) -> Configuration:
    return Configuration(prefill=prefill, decode=decode)


def _rank(candidate: Candidate) -> tuple[int, float, int]:
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


class _Search:
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
        if settings.model == "extended":
            extended = ExtendedModel(workload, platform, settings.kv_headroom)
            if not extended.is_printed:
                self.model = extended
        # One worker cannot hold two roles of which each needs the other.
        self.colocation = Mode.COLOCATION in allowed or workers == 1
        self.disaggregation = Mode.DISAGGREGATION in allowed and workers >= 2
        self.least_decode = least_decode_workers(workload, platform, settings.kv_headroom)
        self.low, self.high = 1, 0
        self.free = 0
        if self.disaggregation:
            last = workers - 1
            self.low = _first(1, last, lambda p: not self._overloaded(p)) if self._overloaded(1) else 1
            self.high = min(last, workers - self.least_decode)
            self.free = self._best_within(1, last)

    @property
    def considered(self) -> int:
        """How many candidates there are."""
        return int(self.colocation) + (self.workers - 1 if self.disaggregation else 0)

    def _overloaded(self, prefill: int) -> bool:
        first, second = self.model.paths(prefill, self.workers - prefill)
        return prefill_overload(first, second, self.settings.prefill_load_limit)

    def _total(self, prefill: int) -> float:
        return max(self.model.paths(prefill, self.workers - prefill))

    def _best_within(self, low: int, high: int) -> int:
        """Exact minimum of max(falling, rising) over N_P in [low, high]; of equals the smallest N_P."""

        def decode_bound(prefill: int) -> bool:
            first, second = self.model.paths(prefill, self.workers - prefill)
            return first <= second

        crossing = min(high, _first(low, high, decode_bound))
        if crossing > low and self._total(crossing - 1) <= self._total(crossing):
            return crossing - 1
        return crossing

    def _violated(self, prefill: int) -> tuple[Constraint, ...]:
        heavy, full = prefill < self.low, prefill > self.high
        if heavy:
            return (Constraint.PREFILL_LOAD, Constraint.DECODE_KV) if full else (Constraint.PREFILL_LOAD,)
        return (Constraint.DECODE_KV,) if full else ()

    def candidate(self, prefill: int) -> Candidate:
        """The candidate with N_P = `prefill`; colocation where that is 0."""
        if prefill == 0:
            predicted = self.model.colocated(self.workers)
            printed = predicted if self.model is self.printed else self.printed.colocated(self.workers)
            return Candidate(
                configuration=_colocated(self.workers), predicted=predicted, printed=printed, feasible=True
            )
        decode = self.workers - prefill
        predicted = self.model.disaggregated(prefill, decode)
        printed = predicted if self.model is self.printed else self.printed.disaggregated(prefill, decode)
        violated = () if self.low <= prefill <= self.high else self._violated(prefill)
        return Candidate(
            configuration=_disaggregated(prefill, decode),
            predicted=predicted,
            printed=printed,
            feasible=not violated,
            violated=violated,
        )

    def best_disaggregated(self) -> int:
        """N_P of the best disaggregated candidate, by `_rank`; 0 where there is none."""
        if not self.disaggregation:
            return 0
        for low, high in (
            (self.low, self.high),
            (self.low, self.workers - 1),
            (1, self.high),
            (1, self.workers - 1),
        ):
            if low <= high:
                return self._best_within(low, high)
        return 0

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
        found.sort(key=_rank)
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

    def limits(self, best: Candidate) -> list[str]:
        """In words: what the constraints removed, and which of them decided against the fastest candidate."""
        if not self.disaggregation:
            return ["one worker cannot be split into prefill and decode"] if self.workers == 1 else []
        words = []
        last = self.workers - 1
        if self.high < last:
            words.append(f"decode_kv: the batch's KV needs N_D >= {self.least_decode}, so N_P <= {max(0, self.high)}")
        if self.low > 1:
            words.append(f"prefill_load: fewer than {self.low} prefill workers fall behind decode")
        if not self.low <= self.free <= self.high and self._total(self.free) < best.makespan_s:
            which = " and ".join(self._violated(self.free))
            words.append(
                f"{which} decided: {_disaggregated(self.free, self.workers - self.free)} would take "
                f"{self._total(self.free):.1f} s, {best.configuration} takes {best.makespan_s:.1f} s"
            )
        return words


def decide(
    *,
    workload: WorkloadProfile,
    platform: PlatformProfile,
    budget_workers: int,
    current: Configuration | None = None,
    settings: DecideSettings = DecideSettings(),
    costs: SwitchCosts = SwitchCosts(),  # noqa: B008 - immutable
    remaining_fraction: float = 1.0,
    steps_ahead: float = 1.0,
    allowed: Collection[Mode] = BOTH_MODES,
    pinned: Configuration | None = None,
    calibrated: bool = True,
) -> Decision:
    """Choose mode and roles for `budget_workers` = N workers (PEARL section 4.3.2).

    The selected configuration always has exactly N workers. `current` is what runs now (None: nothing). A change that
    the budget does not force must promise more than a threshold (`settings`) and must repay its switching cost within
    `remaining_fraction` of the present batch plus `steps_ahead` further ones. `allowed` restricts the modes; `pinned`
    is a person's choice, scaled to N; `calibrated=False` says that the platform profile is a mere prior.
    Raises `ValueError` for arguments out of range.
    """
    _check(budget_workers, remaining_fraction, steps_ahead, allowed)
    if budget_workers == 0:
        return _nothing(current)
    search = _Search(workload, platform, budget_workers, settings, allowed)
    if pinned is not None:
        return _fixed(search, current, pinned, costs)
    horizon = remaining_fraction + steps_ahead
    return _select(search, current, costs, horizon, calibrated)


def _check(budget: int, remaining: float, ahead: float, allowed: Collection[Mode]) -> None:
    if budget < 0:
        raise ValueError(f"budget_workers = {budget}: must be at least 0")
    if not 0 <= remaining <= 1:
        raise ValueError(f"remaining_fraction = {remaining}: must be in [0, 1]")
    if not (math.isfinite(ahead) and ahead >= 0):
        raise ValueError(f"steps_ahead = {ahead}: must be a finite number of at least 0")
    if not allowed:
        raise ValueError("allowed is empty: name at least one mode")


def _nothing(current: Configuration | None) -> Decision:
    return Decision(
        selected=Configuration(),
        previous=current,
        reason=Reason.FORCED if current is not None and current.workers else Reason.INITIAL,
        budget_workers=0,
        candidates=(),
        considered=0,
        predicted_s=math.inf,
        limits=("no worker: nothing runs",),
    )


def _select(
    search: _Search, current: Configuration | None, costs: SwitchCosts, horizon: float, calibrated: bool
) -> Decision:
    """Rank, compare with what runs, and apply hysteresis."""
    ranked = search.ranked()
    best = ranked[0]
    words = search.limits(best)
    kept = search.nearest(current) if current is not None and current.workers else None
    if not best.feasible:
        return _decision(search, ranked, best, current, Reason.FALLBACK, costs, words)
    if not calibrated:
        chosen = kept or (search.candidate(0) if search.colocation else best)
        words.append("the platform profile is a prior that no measurement backs: what needs no ratio is kept")
        return _decision(search, ranked, chosen, current, Reason.UNCALIBRATED, costs, words)
    if current is None or current.workers == 0:
        return _decision(search, ranked, best, current, Reason.INITIAL, costs, words)
    forced = current.workers > search.workers or kept is None
    if kept is None:
        words.append(f"{current} cannot run on {search.workers} workers, nor can what it reaches without role changes")
        return _decision(search, ranked, best, current, Reason.FORCED, costs, words)
    if kept.configuration == best.configuration:
        reason = Reason.ALREADY_BEST if best.configuration == current else Reason.BEST
        return _decision(search, ranked, best, current, Reason.FORCED if forced else reason, costs, words)
    base = switch_between(current, kept.configuration, costs)
    refusal: Reason | None = None
    for challenger in _challengers(ranked, best, kept):
        verdict, why = _challenge(search, current, kept, challenger, base, costs, horizon)
        if verdict is None:
            return _decision(
                search, ranked, challenger, current, Reason.FORCED if forced else Reason.BEST, costs, words
            )
        refusal = refusal or verdict
        words.append(why)
    reason = Reason.FORCED if forced else (refusal or Reason.ALREADY_BEST)
    return _decision(search, ranked, kept, current, reason, costs, words)


def _challengers(ranked: list[Candidate], best: Candidate, kept: Candidate) -> list[Candidate]:
    """The best candidate and, where that needs another mode, the best of the present mode."""
    mode = kept.configuration.mode
    if best.configuration.mode is mode:
        return [best]
    same = next((c for c in ranked if c.feasible and c.configuration.mode is mode), kept)
    return [best, same] if same.configuration != kept.configuration else [best]


def _threshold(settings: DecideSettings, kept: Configuration, target: Configuration) -> float:
    return settings.ratio_threshold if kept.mode is target.mode else settings.mode_threshold


def _challenge(
    search: _Search,
    current: Configuration,
    kept: Candidate,
    challenger: Candidate,
    base: Switch,
    costs: SwitchCosts,
    horizon: float,
) -> tuple[Reason | None, str]:
    """Why `kept` stays in spite of `challenger`; (None, "") where it does not."""
    gain = kept.makespan_s - challenger.makespan_s
    threshold = _threshold(search.settings, kept.configuration, challenger.configuration)
    name = str(challenger.configuration)
    if gain <= threshold * kept.makespan_s:
        share = gain / kept.makespan_s if kept.makespan_s else 0.0
        return Reason.WITHIN_HYSTERESIS, f"{name} is {share:.1%} faster, below the threshold of {threshold:.0%}"
    extra = switch_between(current, challenger.configuration, costs).cost_s - base.cost_s
    if gain * horizon <= extra:
        return (
            Reason.COST_EXCEEDS_GAIN,
            f"{name} saves {gain:.1f} s a batch over {horizon:.2f} batches, less than the switch costs ({extra:.1f} s)",
        )
    return None, ""


def _decision(
    search: _Search,
    ranked: list[Candidate],
    chosen: Candidate,
    current: Configuration | None,
    reason: Reason,
    costs: SwitchCosts,
    words: list[str],
) -> Decision:
    switch = switch_between(current, chosen.configuration, costs)
    gain = threshold = 0.0
    if current is not None and 0 < current.workers <= search.workers:
        model = search.model
        before = (
            model.disaggregated(current.prefill, current.decode)
            if current.prefill
            else model.colocated(current.colocated)
        )
        gain = before.total_s - ranked[0].makespan_s
        threshold = _threshold(search.settings, current, ranked[0].configuration)
    candidates = ranked
    if all(c is not chosen and c.configuration != chosen.configuration for c in ranked):
        candidates = sorted([*ranked, chosen], key=_rank)
    return Decision(
        selected=chosen.configuration,
        previous=current,
        reason=reason,
        budget_workers=search.workers,
        candidates=tuple(candidates),
        considered=search.considered,
        predicted_s=chosen.makespan_s,
        gain_s=gain,
        threshold=threshold,
        switch=switch.kind,
        switching_cost_s=switch.cost_s,
        limits=tuple(words),
    )


def scaled(pinned: Configuration, workers: int) -> Configuration:
    """`pinned` on `workers` workers: the same mode, and the nearest ratio; one worker is colocated."""
    if pinned.workers == workers:
        return pinned
    if not pinned.prefill or workers < 2:
        return Configuration(colocated=workers)
    prefill = min(workers - 1, max(1, round(workers * pinned.prefill / pinned.workers)))
    return Configuration(prefill=prefill, decode=workers - prefill)


def _fixed(search: _Search, current: Configuration | None, pinned: Configuration, costs: SwitchCosts) -> Decision:
    """A person's choice, whatever the model says; its broken constraints are shown."""
    target = scaled(pinned, search.workers)
    ranked = search.ranked()
    words = search.limits(ranked[0])
    if target != pinned:
        words.append(f"pinned {pinned} needs {pinned.workers} workers; {target} is its like on {search.workers}")
    chosen = search.candidate(target.prefill)
    if chosen.violated:
        words.append(f"pinned {target} breaks {' and '.join(chosen.violated)}")
    return _decision(search, ranked, chosen, current, Reason.FIXED, costs, words)
