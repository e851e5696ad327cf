"""Role switching inside a step: the ratio follows the forecast load of the next seconds (Prorsa section 4.2).

A policy of this kind has two voices. Between steps and on elastic events its `decide` speaks, as for every policy:
`pearl+prorsa` leaves mode, budget and borrowing to PEARL, `prorsa` alone keeps the ratio that runs. Inside a step each
`LoadForecast` may propose another ratio, within disaggregation and with the workers that serve; it is carried out as
any other plan, and paid from the same account of switching costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pearl_planner.allocate import Demand, Verdict, target_configuration, weigh_switch
from pearl_planner.decide import DecideSettings
from pearl_planner.elastic import ElasticState, Step
from pearl_planner.policies import ModelPolicy, pearl
from pearl_planner.reconcile import carry_out, current_configuration
from pearl_planner.switching import SwitchCosts
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, Reason
from pearl_state.events import LoadForecast
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Mode
from pearl_state.worker import WorkerId

_PAIR = Configuration(prefill=1, decode=1)


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

    @property
    def expands(self) -> bool:
        """See `Policy`."""
        return self.between.expands

    @property
    def borrows(self) -> bool:
        """See `Policy`."""
        return self.between.borrows

    def decide(
        self,
        *,
        workload: WorkloadProfile,
        platform: PlatformProfile,
        budget_workers: int,
        current: Configuration | None = None,
        remaining_fraction: float = 1.0,
        steps_ahead: float = 3.0,
        pinned: Configuration | None = None,
        calibrated: bool = True,
    ) -> Decision:
        """As `pearl_planner.decide.decide`."""
        if pinned is None and self.keeps_ratio:
            pinned = current if current is not None and current.prefill else _PAIR
        return self.between.decide(
            workload=workload,
            platform=platform,
            budget_workers=budget_workers,
            current=current,
            remaining_fraction=remaining_fraction,
            steps_ahead=steps_ahead,
            pinned=pinned,
            calibrated=calibrated,
        )

    def answer(
        self, forecast: LoadForecast, current: Configuration, workload: WorkloadProfile, platform: PlatformProfile
    ) -> Decision | None:
        """The decision on a forecast; None where it says nothing about the ratio: a colocated cluster, one of a single
        pair, or decode workers without a known KV capacity.
        """
        demand = demand_of(forecast, platform)
        if demand is None or not current.prefill or current.workers < 3:
            return None
        verdict = self._weigh(demand, current, platform)
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

    def _weigh(self, demand: Demand, current: Configuration, platform: PlatformProfile) -> Verdict:
        """The ratio of eq. (1), and whether the way there pays."""
        cached_s = demand.decode_kv_bytes / platform.kv_bytes_per_token / demand.prefill_tokens_per_s
        return weigh_switch(
            demand,
            current=current,
            target=target_configuration(demand, current.workers),
            costs=self.between.costs,
            persistence_s=self.persistence_s,
            cached_prefill_s=cached_s,
        )


def _reason(verdict: Verdict, current: Configuration) -> Reason:
    if verdict.target == current:
        return Reason.ALREADY_BEST
    return Reason.FORECAST if verdict.switch else Reason.COST_EXCEEDS_GAIN


def _words(verdict: Verdict, current: Configuration) -> str:
    return (
        f"forecast: {verdict.target} has a margin of {verdict.margin:.0%} and {current} of "
        f"{verdict.margin_before:.0%}; the switch saves {verdict.gain_s:.1f} s and costs {verdict.cost_s:.1f} s"
    )


def demand_of(forecast: LoadForecast, platform: PlatformProfile) -> Demand | None:
    """The demand that eq. (1) allocates for; None where the platform's KV capacity is unknown."""
    if platform.kv_capacity_bytes <= 0:
        return None
    return Demand(
        prefill_tokens=forecast.prefill_tokens,
        decode_kv_bytes=forecast.decode_kv_bytes,
        horizon_s=forecast.horizon_s,
        prefill_tokens_per_s=forecast.prefill_tokens_per_s,
        kv_capacity_bytes=platform.kv_capacity_bytes,
    )


def prorsa(costs: SwitchCosts | None = None, *, persistence_s: float = 30.0) -> InStepPolicy:
    """Prorsa as in its paper: always disaggregated, no borrowing; it takes the pool as it comes."""
    between = ModelPolicy(
        name="prorsa", borrows=False, modes=frozenset({Mode.DISAGGREGATION}), costs=costs or SwitchCosts()
    )
    return InStepPolicy(name="prorsa", between=between, keeps_ratio=True, persistence_s=persistence_s)


def pearl_prorsa(
    settings: DecideSettings | None = None, costs: SwitchCosts | None = None, *, persistence_s: float = 30.0
) -> InStepPolicy:
    """PEARL's mode, borrowing and budget; Prorsa's ratio inside the step."""
    return InStepPolicy(
        name="pearl+prorsa", between=pearl(settings, costs), keeps_ratio=False, persistence_s=persistence_s
    )


def rebalance(state: ElasticState, trigger: str, loads: Mapping[WorkerId, float]) -> Step:
    """Answer the newest forecast, where the policy does and no plan is under way."""
    policy, forecast = state.settings.policy, state.forecast
    current = current_configuration(state.table)
    if (
        not isinstance(policy, InStepPolicy)
        or forecast is None
        or current is None
        or state.running is not None
        or state.pinned is not None
    ):
        return state, ()
    decision = policy.answer(forecast, current, state.workload, state.platform)
    if decision is None or decision.selected == current:
        # Not recorded: every ten seconds the same answer would bury the decisions that change something.
        return state, ()
    return carry_out(state, decision, frozenset(state.table.active()), trigger, loads)
