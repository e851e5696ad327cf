"""The PD Decision Engine of PEARL section 4.3: enumerate, discard, compare, and switch only where it pays."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from pearl_planner.search import CandidateSearch, DecideSettings, rank
from pearl_planner.switching import Switch, SwitchCosts, switch_between
from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Decision, Reason
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode

__all__ = ["BOTH_MODES", "STEPS_AHEAD", "DecideSettings", "decide", "scaled"]

BOTH_MODES: Final = frozenset(Mode)

STEPS_AHEAD: Final = 3.0
"""Batches after the present one over which a gain counts: about what passes between two changes of the pool in the
paper's traces."""


def decide(
    *,
    workload: WorkloadProfile,
    platform: PlatformProfile,
    budget_workers: int,
    current: Configuration | None = None,
    settings: DecideSettings = DecideSettings(),  # noqa: B008 - immutable
    costs: SwitchCosts = SwitchCosts(),  # noqa: B008 - immutable
    remaining_fraction: float = 1.0,
    steps_ahead: float = STEPS_AHEAD,
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
    # A person's choice may use a mode that the policy would not.
    modes = allowed if pinned is None else BOTH_MODES
    search = CandidateSearch(workload, platform, budget_workers, settings, modes)
    way = _Way(
        current=current,
        costs=costs,
        horizon=remaining_fraction + steps_ahead,
        cached_prefill_s=remaining_fraction * search.context_prefill_s,
    )
    if pinned is not None:
        return _fixed(search, way, pinned)
    return _select(search, way, calibrated)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Where a decision starts from, and what leaving there costs."""

    current: Configuration | None
    costs: SwitchCosts
    horizon: float
    """Batches over which a gain counts."""
    cached_prefill_s: float
    """Prefill of all contexts that run now, on one worker, seconds."""

    def to(self, target: Configuration) -> Switch:
        """The switch from here to `target`."""
        return switch_between(self.current, target, self.costs, self.cached_prefill_s)


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


def _select(search: CandidateSearch, way: _Way, calibrated: bool) -> Decision:
    """Rank, compare with what runs, and apply hysteresis."""
    ranked = search.ranked()
    best = ranked[0]
    words = search.limits(ranked)
    current = way.current if way.current is not None and way.current.workers else None
    kept = search.nearest(current) if current is not None else None
    if not best.feasible:
        return _decision(search, way, ranked, best, Reason.FALLBACK, words)
    if not calibrated:
        chosen = kept or (search.candidate(0) if search.colocation else best)
        words.append("the platform profile is a prior that no measurement backs: what needs no ratio is kept")
        return _decision(search, way, ranked, chosen, Reason.UNCALIBRATED, words)
    if current is None:
        return _decision(search, way, ranked, best, Reason.INITIAL, words)
    if kept is None:
        words.append(f"{current} cannot run on {search.workers} workers, nor can what it reaches without role changes")
        chosen = _cheapest(way, ranked) if search.steady else best
        if chosen is not best:
            words.append(f"{best.configuration} is faster than {chosen.configuration}, but not by what it costs more")
        return _decision(search, way, ranked, chosen, Reason.FORCED, words)
    chosen, reason = _settle(search, way, ranked, kept, words)
    if current.workers > search.workers:
        reason = Reason.FORCED
    elif reason is Reason.ALREADY_BEST and chosen.configuration != current:
        reason = Reason.BEST
    return _decision(search, way, ranked, chosen, reason, words)


def _settle(
    search: CandidateSearch, way: _Way, ranked: list[Candidate], kept: Candidate, words: list[str]
) -> tuple[Candidate, Reason]:
    """Stay with `kept`, or go to what beats it by enough; adds to `words` what was suppressed."""
    refusal = Reason.ALREADY_BEST
    for challenger in _challengers(ranked, kept):
        verdict, why = _challenge(search, way, kept, challenger)
        if verdict is None:
            return challenger, Reason.BEST
        words.append(why)
        if refusal is Reason.ALREADY_BEST:
            refusal = verdict
    return kept, refusal


def _cheapest(way: _Way, ranked: list[Candidate]) -> Candidate:
    """Where a steady pool must change: the feasible candidate of which way and stay take least over the horizon."""
    feasible = [candidate for candidate in ranked if candidate.feasible]
    return min(feasible, key=lambda c: c.makespan_s * way.horizon + way.to(c.configuration).cost_s)


def _challengers(ranked: list[Candidate], kept: Candidate) -> list[Candidate]:
    """What is faster than `kept`: the best candidate and, where that has the other mode, the best of `kept`'s."""
    best, mode = ranked[0], kept.configuration.mode
    found = [best]
    if best.configuration.mode is not mode:
        found += [c for c in ranked if c.feasible and c.configuration.mode is mode][:1]
    return [c for c in found if c.makespan_s < kept.makespan_s]


def _threshold(search: CandidateSearch, way: _Way, kept: Configuration, target: Configuration) -> float:
    """Relative gain that `target` must promise over `kept`.

    Under a steady load the pool is a new one with every step, and most of it joins in whatever roles it is given: only
    the part that would change counts. A pool of 4 that becomes one of 12 is bound by a third of the threshold.
    """
    settings = search.settings
    threshold = settings.ratio_threshold
    if kept.mode is not target.mode:
        threshold = settings.mode_threshold
        if search.step_error:
            # What a switch costs is charged on its own: left to doubt is what the model is known to miss, in each mode.
            threshold = min(threshold, max(settings.ratio_threshold, 2.0 * search.step_error))
    if not search.steady:
        return threshold
    switch = way.to(target)
    return threshold * (switch.flipped + switch.relaunched) / search.workers


def _challenge(search: CandidateSearch, way: _Way, kept: Candidate, challenger: Candidate) -> tuple[Reason | None, str]:
    """Why `kept` stays in spite of `challenger`; (None, "") where it does not."""
    gain = kept.makespan_s - challenger.makespan_s
    threshold = _threshold(search, way, kept.configuration, challenger.configuration)
    name = str(challenger.configuration)
    if gain <= threshold * kept.makespan_s:
        return (
            Reason.WITHIN_HYSTERESIS,
            f"{name} is {gain / kept.makespan_s:.1%} faster, below the threshold of {threshold:.0%}",
        )
    extra = way.to(challenger.configuration).cost_s - way.to(kept.configuration).cost_s
    if gain * way.horizon <= extra:
        return (
            Reason.COST_EXCEEDS_GAIN,
            f"{name} saves {gain:.1f} s a batch over {way.horizon:.2f} batches, less than the switch costs "
            f"({extra:.1f} s)",
        )
    return None, ""


def _decision(
    search: CandidateSearch, way: _Way, ranked: list[Candidate], chosen: Candidate, reason: Reason, words: list[str]
) -> Decision:
    current = way.current
    switch = way.to(chosen.configuration)
    gain = threshold = 0.0
    if current is not None and 0 < current.workers <= search.workers:
        same = current.workers == search.workers and (search.disaggregation or not current.prefill)
        before = search.candidate(current.prefill).predicted if same else search.terms(current)
        gain = before.total_s - ranked[0].makespan_s
        threshold = _threshold(search, way, current, ranked[0].configuration)
    candidates = ranked
    if all(c is not chosen and c.configuration != chosen.configuration for c in ranked):
        candidates = sorted([*ranked, chosen], key=rank)
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


def _fixed(search: CandidateSearch, way: _Way, pinned: Configuration) -> Decision:
    """A person's choice, whatever the model says; its broken constraints are shown."""
    target = scaled(pinned, search.workers)
    ranked = search.ranked()
    words = search.limits(ranked)
    if target != pinned:
        words.append(f"pinned {pinned} needs {pinned.workers} workers; {target} is its like on {search.workers}")
    chosen = search.candidate(target.prefill)
    if chosen.violated:
        words.append(f"pinned {target} breaks {' and '.join(chosen.violated)}")
    return _decision(search, way, ranked, chosen, Reason.FIXED, words)
