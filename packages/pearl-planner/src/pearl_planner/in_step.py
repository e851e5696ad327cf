"""Role switching inside a step: the ratio follows the forecast load of the next seconds (Prorsa section 4.2).

A policy of this kind has two voices. Between steps and on elastic events its `decide` speaks, as for every policy:
`pearl+prorsa` leaves mode, budget and borrowing to PEARL, `prorsa` alone keeps the ratio that runs. Inside a step each
`LoadForecast` may propose another ratio, within disaggregation and with the workers that serve; it is carried out as
any other plan, and paid from the same account of switching costs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, harmonic_mean
from typing import Final, Unpack

from pearl_planner.allocate import Ahead, Demand, Verdict, target_configuration, weigh_switch
from pearl_planner.decide import DecideSettings
from pearl_planner.elastic import ElasticState, Step
from pearl_planner.extended import mean_trajectories
from pearl_planner.policies import ModelPolicy, Question, pearl
from pearl_planner.reconcile import carry_out, current_configuration
from pearl_planner.switching import SwitchCosts
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, Reason, SwitchKind
from pearl_state.events import LoadForecast
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode
from pearl_state.worker import WorkerId

REMEMBERED: Final = 12
"""Forecasts under one configuration that tell for how long a change has been wanted."""

_AVERAGED: Final = 3
"""Newest forecasts that are averaged: one window alone is noise, and a switch outlasts it."""

_FULL: Final = 0.8
"""Part of the decode pool's KV from which on it is taken to be full: the rest is too small for most contexts."""

_ROOMY: Final = 0.6
"""Part of it up to which every context is taken to find room."""

_TRIED: Final = 8
"""Ratios of the best accounts that the makespan model is asked about: each question costs a tenth of a millisecond."""

SETTLED: Final = 6
"""Forecasts under one configuration before it may change again: what a switch moved must come to rest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InStepPolicy:
    """A `Policy` that also answers forecasts."""

    name: str
    between: ModelPolicy
    """Decides on elastic events and between steps."""
    keeps_ratio: bool
    """Whether `decide` keeps the ratio that runs (Prorsa alone), or is asked for the best one (PEARL)."""
    persistence_s: float = 30.0
    """For how long a forecast demand is taken to last when a switch is weighed."""
    keeps_prefixes: bool = False
    """Whether the prefixes of a worker that changes its role stay known to the others (storage that all share)."""
    first: Configuration | None = None
    """Ratio to begin with where the ratio is kept; None: what the profiles say."""

    @property
    def expands(self) -> bool:
        """See `Policy`."""
        return self.between.expands

    @property
    def borrows(self) -> bool:
        """See `Policy`."""
        return self.between.borrows

    def observing(self, kind: SwitchKind, seconds: float) -> "InStepPolicy":
        """See `policies.Observing`."""
        return replace(self, between=self.between.observing(kind, seconds))

    @property
    def costs(self) -> SwitchCosts:
        """See `policies.Recalling`."""
        return self.between.costs

    def recalling(self, costs: SwitchCosts) -> "InStepPolicy":
        """See `policies.Recalling`."""
        return replace(self, between=self.between.recalling(costs))

    def decide(self, **asked: Unpack[Question]) -> Decision:
        """As `pearl_planner.decide.decide`."""
        if asked.get("pinned") is None and self.keeps_ratio:
            current = asked.get("current")
            asked["pinned"] = current if current is not None and current.prefill else self.first or self._begin(asked)
        return self.between.decide(**asked)

    def _begin(self, asked: Question) -> Configuration:
        """The ratio of the profiles. Of those under way nobody waits outside, which the model of a steady load has."""
        once = asked.copy()
        once["workload"] = replace(asked["workload"], steady=False)
        return self.between.decide(**once).selected

    def answer(
        self,
        forecasts: Sequence[LoadForecast],
        current: Configuration,
        workload: WorkloadProfile,
        platform: PlatformProfile,
    ) -> Decision | None:
        """The decision on the newest forecasts; None where they say nothing about the ratio: a colocated cluster, one
        of a single pair, or decode workers without a known KV capacity.
        """
        if not current.prefill or current.workers < 3:
            return None
        verdict = self._weigh(forecasts, current, workload, platform)
        if verdict is None:
            return None
        chosen = verdict.target if verdict.switch else current
        decision = self.between.decide(
            workload=workload, platform=platform, budget_workers=current.workers, current=current, pinned=chosen
        )
        return replace(
            decision,
            reason=_reason(verdict, current),
            gain_s=verdict.gain_s,
            switching_cost_s=verdict.cost_s if verdict.switch else 0.0,
            limits=(_words(verdict, current),),
        )

    def _weigh(
        self,
        forecasts: Sequence[LoadForecast],
        current: Configuration,
        workload: WorkloadProfile,
        platform: PlatformProfile,
    ) -> Verdict | None:
        """The ratio on the way to that of eq. (1) whose gain exceeds its cost by most; None without a known demand.

        What leaves the prefill pool takes the prefixes with it that it keeps for the live trajectories; what leaves
        the decode pool holds nothing that the prefill pool would have to compute. A demand that asked for the same
        direction for t seconds is taken to last as long again, `persistence_s` at least. What the makespan model
        does not expect to be clearly faster for those that live is not considered, whatever its margin; it expects
        nothing before a step was measured. Where a role has more work than it can do, it is enough that the model does
        not expect to be clearly slower. Of decode memory it knows nothing: where that is full, more of it is considered
        whatever the model expects.
        """
        demand = demand_of(forecasts[-_AVERAGED:], current.decode, workload, platform)
        if demand is None:
            return None
        target = target_configuration(demand, current.workers)
        contexts_s = forecasts[-1].live * workload.context_tokens * platform.prefill_per_token_s
        leaving_s = 0.0 if self.keeps_prefixes else contexts_s * current.workers / current.prefill
        persistence_s = max(self.persistence_s, _wanted_s(forecasts, current, target, workload, platform))
        ahead = _ahead(forecasts[-_AVERAGED:], demand, current, persistence_s)
        verdicts = [
            weigh_switch(
                demand,
                current=current,
                target=candidate,
                costs=self.between.costs,
                ahead=ahead,
                cached_prefill_s=leaving_s if candidate.prefill < current.prefill else 0.0,
            )
            for candidate in _on_the_way(current, target)
        ]
        # As between steps: what is faster by less than the threshold is not told from noise.
        threshold = self.between.settings.ratio_threshold
        clear = [verdict for verdict in verdicts if verdict.gain_s > threshold * persistence_s]
        clear.sort(key=lambda verdict: verdict.cost_s - verdict.gain_s)
        if clear and workload.context_tokens:
            live = max(1, forecasts[-1].live)
            full = is_full(forecasts[-1], current.decode, platform)
            # What is overloaded as measured need not be expected to get faster, but not slower either.
            most = 1.0 + threshold if verdicts[0].margin_before < 0.0 else 1.0 - threshold
            below_s = most * self._foreseen_s(current, live, workload, platform)
            clear = [
                v
                for v in clear[:_TRIED]
                if (full and v.target.decode > current.decode)
                or self._foreseen_s(v.target, live, workload, platform) < below_s
            ]
        return clear[0] if clear else replace(verdicts[0], switch=False)

    def _foreseen_s(
        self, configuration: Configuration, live: int, workload: WorkloadProfile, platform: PlatformProfile
    ) -> float:
        """What the makespan model expects of a configuration with `live` trajectories under way.

        Margins speak of load. Where few trajectories are left nobody queues, and what counts is how long a turn takes.
        """
        turns = workload.mean_turns or workload.turns
        load = mean_trajectories(replace(workload, batch=live, turns=turns))
        if self.keeps_ratio:
            load = replace(load, steady=False)
        if self.keeps_prefixes:
            # A trajectory that another worker takes finds there what it left.
            load = replace(load, moved_fraction=0.0, pair_moved_fraction=0.0)
        return self.between.decide(
            workload=load, platform=platform, budget_workers=configuration.workers, pinned=configuration
        ).predicted_s


def _ahead(forecasts: Sequence[LoadForecast], demand: Demand, current: Configuration, persistence_s: float) -> Ahead:
    """What is known of the time after a switch: prompts that wait are computed some time, and no others come for them.

    Newer weights make all contexts new at once: a queue that asks for many workers and is gone before they changed.
    What arrives meanwhile takes its part of the workers; where it takes all, the queue lasts.
    """
    waiting = min(demand.prefill_tokens, fmean(forecast.backlog_tokens for forecast in forecasts))
    arriving = demand.prefill_tokens - waiting
    known = [forecast.arriving_tokens_per_s for forecast in forecasts if forecast.arriving_tokens_per_s > 0.0]
    speed = harmonic_mean(known) if known else demand.prefill_tokens_per_s
    later = replace(demand, prefill_tokens=arriving, prefill_tokens_per_s=speed)
    queue_s = max(0.0, demand.prefill - later.prefill) * demand.horizon_s
    free = current.prefill - later.prefill
    return Ahead(
        persistence_s=persistence_s,
        later=later,
        later_from_s=queue_s / free if free > 0.0 else math.inf,
        bound_s=SETTLED * demand.horizon_s,
    )


def _on_the_way(current: Configuration, target: Configuration) -> list[Configuration]:
    """All ratios between what runs (exclusive, unless it is the target) and the target, the target first."""
    towards = 1 if current.prefill > target.prefill else -1
    steps = range(target.prefill, current.prefill, towards) or range(target.prefill, target.prefill + 1)
    return [Configuration(prefill=prefill, decode=current.workers - prefill) for prefill in steps]


def _wanted_s(
    forecasts: Sequence[LoadForecast],
    current: Configuration,
    target: Configuration,
    workload: WorkloadProfile,
    platform: PlatformProfile,
) -> float:
    """For how long the newest forecasts have asked for a change in the direction of `target`, seconds."""
    wanted_s, more = 0.0, target.prefill > current.prefill
    for forecast in reversed(forecasts):
        demand = demand_of((forecast,), current.decode, workload, platform)
        if demand is None or target == current:
            break
        prefill = target_configuration(demand, current.workers).prefill
        if prefill == current.prefill or (prefill > current.prefill) is not more:
            break
        wanted_s += forecast.horizon_s
    return wanted_s


def _reason(verdict: Verdict, current: Configuration) -> Reason:
    if verdict.target == current:
        return Reason.ALREADY_BEST
    return Reason.FORECAST if verdict.switch else Reason.COST_EXCEEDS_GAIN


def _words(verdict: Verdict, current: Configuration) -> str:
    return (
        f"forecast: {verdict.target} has a margin of {verdict.margin:.0%} and {current} of "
        f"{verdict.margin_before:.0%}; the switch saves {verdict.gain_s:.1f} s and costs {verdict.cost_s:.1f} s"
    )


def decode_busy(forecasts: Sequence[LoadForecast], workload: WorkloadProfile, platform: PlatformProfile) -> float:
    """Decode workers that the requests which the forecasts admit would keep busy at full batches.

    A batch of n makes n tokens in A + b n seconds, at most 1/b a second (PEARL eq. 3). KV alone says nothing of that:
    a pool whose memory is nearly empty may be as busy as it can be. Before a context was measured, neither is the
    cost of a sequence: then KV is counted in sequences, of which 2 A/b make two thirds of the most tokens.
    """
    if not workload.context_tokens:
        kv_bytes = fmean(forecast.decode_kv_bytes for forecast in forecasts)
        each_bytes = max(1.0, workload.new_prompt_tokens) * platform.kv_bytes_per_token
        efficient = 2.0 * platform.decode_fixed_s / max(1e-12, platform.decode_per_sequence_s)
        return kv_bytes / (each_bytes * max(1.0, efficient)) if each_bytes > 0 else 0.0
    requests_per_s = fmean(forecast.admitted_tokens / forecast.horizon_s for forecast in forecasts)
    requests_per_s /= workload.context_tokens
    return requests_per_s * workload.response_tokens * platform.decode_per_sequence_s


def is_full(forecast: LoadForecast, decode: int, platform: PlatformProfile) -> bool:
    """Whether the KV memory of `decode` decode workers has no room for most contexts."""
    return forecast.resident_kv_bytes >= _FULL * decode * platform.kv_capacity_bytes


def _waiting_share(forecast: LoadForecast, decode: int, platform: PlatformProfile) -> float:
    """Part of what wants to enter decode that waits for its memory: none while there is room for all, all of it in a
    pool that is full, and in between as much as the pool is on its way from one to the other.
    """
    filled = forecast.resident_kv_bytes / (decode * platform.kv_capacity_bytes)
    return min(1.0, max(0.0, (filled - _ROOMY) / (_FULL - _ROOMY)))


def _decode_kv_bytes(forecast: LoadForecast, decode: int, platform: PlatformProfile) -> float:
    """K^D + K̂^D; where the decode pool is full, the KV with which it would admit all that wants to be prefilled.

    A full pool admits who finds room, and what waits for room waits in front of prefill: it looks like work for prefill
    and like none for decode, and would draw workers away from where they are missing. By Little's law requests stay in
    decode for as long as KV there is over KV that is admitted a second; for W^P instead of Â^D to be admitted with as
    long a stay, the KV must be W^P / Â^D times as much, and at most what is there and all of W^P. Continuous in what
    the pool holds and admits.
    """
    share = _waiting_share(forecast, decode, platform)
    if not share:
        return forecast.decode_kv_bytes
    # Contexts that begin alike share memory: their sum may exceed what is there.
    resident = min(forecast.resident_kv_bytes, decode * platform.kv_capacity_bytes)
    wanted = resident + forecast.prefill_tokens * platform.kv_bytes_per_token
    # Of an expectation of less than a token nothing can be divided; long before that, all of W^P is less.
    if resident * forecast.prefill_tokens < wanted * forecast.admitted_tokens:
        wanted = resident * max(1.0, forecast.prefill_tokens / forecast.admitted_tokens)
    return (1.0 - share) * forecast.decode_kv_bytes + share * wanted


def demand_of(
    forecasts: Sequence[LoadForecast], decode: int, workload: WorkloadProfile, platform: PlatformProfile
) -> Demand | None:
    """The mean demand that eq. (1) allocates for, with `decode` decode workers now; None where the platform's KV
    capacity is unknown.
    """
    capacity = platform.kv_capacity_bytes
    if capacity <= 0 or not forecasts:
        return None
    tokens = fmean(forecast.prefill_tokens for forecast in forecasts)
    busy_s = fmean(forecast.prefill_tokens / forecast.prefill_tokens_per_s for forecast in forecasts)
    return Demand(
        prefill_tokens=tokens,
        decode_kv_bytes=fmean(_decode_kv_bytes(forecast, decode, platform) for forecast in forecasts),
        horizon_s=forecasts[-1].horizon_s,
        prefill_tokens_per_s=tokens / busy_s if busy_s > 0 else forecasts[-1].prefill_tokens_per_s,
        kv_capacity_bytes=capacity,
        decode_busy=decode_busy(forecasts, workload, platform),
    )


def prorsa(
    costs: SwitchCosts | None = None, *, persistence_s: float = 30.0, first: Configuration | None = None
) -> InStepPolicy:
    """Prorsa as in its paper: always disaggregated, no borrowing; it takes the pool as it comes."""
    between = ModelPolicy(
        name="prorsa", borrows=False, modes=frozenset({Mode.DISAGGREGATION}), costs=costs or SwitchCosts()
    )
    return InStepPolicy(name="prorsa", between=between, keeps_ratio=True, persistence_s=persistence_s, first=first)


def pearl_prorsa(
    settings: DecideSettings | None = None, costs: SwitchCosts | None = None, *, persistence_s: float = 30.0
) -> InStepPolicy:
    """PEARL's mode, borrowing and budget; Prorsa's ratio inside the step."""
    return InStepPolicy(
        name="pearl+prorsa", between=pearl(settings, costs), keeps_ratio=False, persistence_s=persistence_s
    )


def rebalance(state: ElasticState, trigger: str, loads: Mapping[WorkerId, float]) -> Step:
    """Answer the newest forecast, where the policy does and no plan is under way."""
    policy, forecasts = state.settings.policy, state.forecasts
    current = current_configuration(state.table)
    if (
        not isinstance(policy, InStepPolicy)
        or len(forecasts) < SETTLED
        or current is None
        or state.running is not None
        or state.pinned is not None
    ):
        return state, ()
    decision = policy.answer(forecasts, current, state.workload, state.platform)
    if decision is None or decision.selected == current:
        # Not recorded: every ten seconds the same answer would bury the decisions that change something.
        return state, ()
    return carry_out(state, decision, frozenset(state.table.active()), trigger, loads)
