"""The policies that a simulation compares, as settings of the one control plane."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pearl_executor.availability import TraceRow
from pearl_planner.decide import DecideSettings
from pearl_planner.elastic import Borrowing
from pearl_planner.in_step import InStepPolicy, pearl_prorsa, prorsa
from pearl_planner.policies import ModelPolicy, Policy, colocated_elastic, fixed, pearl, static_pd
from pearl_planner.readiness import fixed_batch
from pearl_planner.switching import SwitchCosts
from pearl_rl.own_policy import own_policy
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.rollout.pipeline_settings import Injection
from pearl_rl.rollout.readiness import ReadinessMonitor
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.serving import ServingLimits
from pearl_rl.rollout.task_gate import TaskGate, TaskGateLimits, batching_gate
from pearl_rl.settings.names import injects_continuously, with_tiderl
from pearl_rl.simulation.batch_run import RIGID_RATIO, RIGID_SLACK
from pearl_rl.simulation.scenario import Scenario
from pearl_state.configuration import Configuration
from pearl_state.events import Event
from pearl_state.roles import Mode


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """A policy with the borrowing it goes with and the pools it sees."""

    policy: Policy
    borrowing: Borrowing
    reserved_gpus: int
    preemptible_gpus: int


def policy_setup(scenario: Scenario, costs: SwitchCosts, trace: Sequence[TraceRow]) -> PolicySetup:
    """What `scenario.policy` stands for.

    - `roll`: the reserved GPUs, colocated. `roll-large`: the same with a larger fixed pool.
    - `rlboost`: reserved and preemptible GPUs, colocated; with `policy.seeding_s`, training GPUs for so long after each
      update as well (RLBoost's seeding window; PEARL's RLBoost+ has none, section 7).
    - `bidirl`: reserved GPUs and gated borrowing, colocated.
    - `static-pd`: reserved and preemptible GPUs at one P:D ratio.
    - `pearl`; `pearl-disaggregated`: its disaggregation alone (Figure 7's A), `pearl-ungated`: with ungated borrowing
      (A + B); both never colocate, as in the paper's ablation. `pearl-no-borrowing`, `pearl-colocated`: less one part.
    - `oracle`: `pearl`, but it simulates every feasible configuration where `pearl` predicts them (see `oracle`).
    - `tiderl`: a cluster of fixed size, colocated; training GPUs go to rollout whenever training waits for data.
      `…+tiderl`: that policy, with continuous injection (see `injection`).
    - `prorsa`: reserved and preemptible GPUs, disaggregated, the ratio moved by forecasts inside a step, no borrowing.
      `pearl+prorsa`: `pearl`, with that ratio inside a step.
    """
    name, cluster = scenario.policy.name, scenario.cluster
    policy, borrowing = _policy(scenario, costs)
    if scenario.policy.borrowing:
        borrowing = Borrowing(scenario.policy.borrowing)
        policy = _borrowing(policy, borrows=borrowing is not Borrowing.OFF)
    reserved, preemptible = cluster.reserved_rollout_gpus, cluster.max_preemptible_gpus
    if name == "roll-large":
        reserved, preemptible = _large(scenario, trace), 0
    elif not policy.expands:
        preemptible = 0
    return PolicySetup(policy, borrowing, reserved, preemptible)


_TIDERL = "+tiderl"


def injection(scenario: Scenario) -> Injection:
    """When groups are dispatched: as the scenario says, else as its policy does."""
    continuous = injects_continuously(scenario.rollout.injection, scenario.policy.name)
    return Injection.CONTINUOUS if continuous else Injection.BATCH


def task_gate(
    scenario: Scenario, router: Router, kv_tokens: int, lifecycle: LifecycleTrace | None = None
) -> TaskGate | None:
    """Continuous task batching in front of `router`, whose workers hold `kv_tokens` each; None where it is off."""
    rollout = scenario.rollout
    if rollout.task_batching == "off" or (rollout.task_batching == "auto" and not with_tiderl(scenario.policy.name)):
        return None
    context = scenario.workload.max_context_tokens
    limits = TaskGateLimits(
        kv_tokens=kv_tokens,
        # One trajectory must fit, or it would wait for ever.
        budget_fraction=max(rollout.kv_budget_fraction, min(1.0, context / kv_tokens)),
        growth_tokens=context,
        wait_s=30 * 86_400.0,
    )
    return batching_gate(router, limits, context_tokens=context, group_size=rollout.group_size, lifecycle=lifecycle)


def readiness(scenario: Scenario, post: Callable[[Event], None]) -> ReadinessMonitor | None:
    """Measures how ready the data is at each update; None where that moves nothing."""
    rollout = scenario.rollout
    if rollout.readiness == "off" or (rollout.readiness == "auto" and not with_tiderl(scenario.policy.name)):
        return None
    return ReadinessMonitor(fixed_batch(rollout.batch), group_size=rollout.group_size, post=post)


_BOUND = frozenset({"roll", "roll-large"})


def serving_limits(scenario: Scenario, *, binds: bool) -> ServingLimits:
    """When a trajectory moves to another worker: elastic systems balance by what its prefix is worth, as production.

    ROLL binds each environment to a worker with its first request, for good (`RequestScheduler`, `src_rank2_dp_rank`)
    where `binds` says that this is simulated. Where not, it balances too, whatever a prefix is worth.
    """
    if scenario.policy.name not in _BOUND:
        return ServingLimits()
    slack = math.inf if binds else RIGID_SLACK * scenario.tp
    return ServingLimits(affinity_slack=slack, affinity_slack_ratio=RIGID_RATIO, prefix_reuse=1.0)


_PATIENCE = 0.1


def straggler_patience(scenario: Scenario) -> float:
    """How long an update waits for samples that it would make too old, in mean step times."""
    chosen = scenario.rollout.straggler_patience
    if chosen is None:
        chosen = _PATIENCE if with_tiderl(scenario.policy.name) else 0.0
    return chosen or math.inf


def seeding_s(scenario: Scenario) -> float:
    """For how long after an update training GPUs take part in rollout at most; infinity where no policy limits it."""
    choice = scenario.policy
    return choice.seeding_s if choice.name == "rlboost" and choice.seeding_s else math.inf


def _borrowing(policy: Policy, *, borrows: bool) -> Policy:
    if not isinstance(policy, InStepPolicy | ModelPolicy):
        return policy
    if isinstance(policy, InStepPolicy):
        return replace(policy, between=replace(policy.between, borrows=borrows))
    return replace(policy, borrows=borrows)


def _policy(scenario: Scenario, costs: SwitchCosts) -> tuple[Policy, Borrowing]:
    choice = scenario.policy
    if ":" in choice.name:
        own = own_policy(choice.name)
        return own, Borrowing.GATED if own.borrows else Borrowing.OFF
    name = choice.name.removesuffix(_TIDERL)
    ratio, mode = choice.thresholds
    settings = DecideSettings(model=choice.model, ratio_threshold=ratio, mode_threshold=mode)
    if name in ("roll", "roll-large"):
        return fixed(), Borrowing.OFF
    if name == "rlboost":
        seeds = seeding_s(scenario) < math.inf
        boost = replace(colocated_elastic(), name="rlboost", borrows=seeds)
        return boost, Borrowing.UNGATED if seeds else Borrowing.OFF
    if name == "static-pd":
        return static_pd(Configuration.parse(choice.configuration)), Borrowing.OFF
    if name == "prorsa":
        return prorsa(costs), Borrowing.OFF
    if name == "pearl+prorsa":
        return pearl_prorsa(settings, costs), Borrowing.GATED
    borrowing, modes, expands = _PARTS[name]
    whole = replace(pearl(settings, costs), name=choice.name, modes=modes, expands=expands)
    return replace(whole, borrows=borrowing is not Borrowing.OFF), borrowing


_COLOCATION, _DISAGGREGATION = frozenset({Mode.COLOCATION}), frozenset({Mode.DISAGGREGATION})
_PARTS: Mapping[str, tuple[Borrowing, frozenset[Mode], bool]] = {
    "pearl": (Borrowing.GATED, frozenset(Mode), True),
    "pearl-disaggregated": (Borrowing.OFF, _DISAGGREGATION, True),
    "pearl-ungated": (Borrowing.UNGATED, _DISAGGREGATION, True),
    "pearl-gated": (Borrowing.GATED, _DISAGGREGATION, True),
    "pearl-no-borrowing": (Borrowing.OFF, frozenset(Mode), True),
    "pearl-colocated": (Borrowing.GATED, _COLOCATION, True),
    "bidirl": (Borrowing.GATED, _COLOCATION, False),
    "tiderl": (Borrowing.UNGATED, _COLOCATION, False),
    "oracle": (Borrowing.GATED, frozenset(Mode), True),
}
"""Policies that ask the PD Decision Engine: borrowing, modes, and whether they take preemptible GPUs."""


def _large(scenario: Scenario, trace: Sequence[TraceRow]) -> int:
    """The pool of `roll-large`: as set, or the trace's mean with the reserved ones, rounded up to whole workers."""
    cluster, tp = scenario.cluster, scenario.tp
    if cluster.large_rollout_gpus:
        return cluster.large_rollout_gpus
    end_s = max(scenario.run.duration_s, trace[-1].t_s if trace else 0.0)
    mean = 0.0
    for row, following in zip(trace, [*trace[1:], None], strict=True):
        until_s = end_s if following is None else following.t_s
        mean += row.count * (until_s - row.t_s) / end_s
    return math.ceil((cluster.reserved_rollout_gpus + mean) / tp - 1e-9) * tp
