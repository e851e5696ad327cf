"""The oracle: simulates every configuration of a budget on the very batches to come, and takes the best. The bound.

It knows what no planner can: the trajectories themselves. What it costs is a simulation for each candidate, so it is
for small scenarios and for judging.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, Unpack

from pearl_planner.decide import STEPS_AHEAD
from pearl_planner.policies import Policy, Question
from pearl_planner.switching import SwitchCosts, switch_between
from pearl_rl.rollout.environments.protocol import Task
from pearl_rl.simulation.batch_run import BatchOutcome, WorkerModel, run_batch
from pearl_rl.simulation.workload import Script, Workload
from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Decision, Reason

MOST_WORKERS: Final = 24
"""Largest budget of the policy, workers: each of its configurations is simulated."""

_BATCHES: Final = 2


def configurations(workers: int) -> list[Configuration]:
    """All of a budget: colocated first, then by N_P. Raises `ValueError` without a worker."""
    if workers < 1:
        raise ValueError(f"workers = {workers}: a configuration needs at least 1")
    return [Configuration(colocated=workers), *(Configuration(p, workers - p) for p in range(1, workers))]


def simulated_makespans(
    batches: Sequence[Sequence[Script]],
    candidates: Sequence[Configuration],
    model: WorkerModel,
    *,
    stable_fraction: float = 1.0,
) -> Mapping[Configuration, float]:
    """Mean makespan of `batches` under each candidate, seconds."""

    def play(scripts: Sequence[Script], candidate: Configuration) -> BatchOutcome:
        return run_batch(scripts, candidate, model, stable_fraction=stable_fraction)

    return {candidate: fmean([play(scripts, candidate).makespan_s for scripts in batches]) for candidate in candidates}


def best(makespans: Mapping[Configuration, float]) -> Configuration:
    """The fastest; of equals the first."""
    return min(makespans, key=makespans.__getitem__)


def first_batches(workload: Workload, batch: int, group_size: int) -> tuple[tuple[Script, ...], ...]:
    """The scripts of a run's first batches, as its pipeline numbers them."""

    def script(number: int) -> Script:
        return workload.script(Task(id=f"{number // group_size:06d}", seed=0, payload={}), number)

    return tuple(tuple(script(n) for n in range(k * batch, (k + 1) * batch)) for k in range(_BATCHES))


@dataclass(frozen=True, slots=True)
class OraclePolicy:
    """A `Policy` that simulates, once for each budget, every configuration that `base` deems feasible.

    It takes the fastest wherever the time left repays the switch. What a person pinned goes to `base`.
    """

    base: Policy
    batches: Sequence[Sequence[Script]]
    model: WorkerModel
    stable_fraction: float
    costs: SwitchCosts
    _known: dict[Configuration, float] = field(default_factory=dict[Configuration, float])

    @property
    def name(self) -> str:
        """See `Policy`."""
        return "oracle"

    @property
    def expands(self) -> bool:
        """See `Policy`."""
        return self.base.expands

    @property
    def borrows(self) -> bool:
        """See `Policy`."""
        return self.base.borrows

    def decide(self, **asked: Unpack[Question]) -> Decision:
        """As `pearl_planner.decide.decide`, with simulated makespans in place of predicted ones."""
        predicted = self.base.decide(**asked)
        if asked.get("pinned") is not None or not predicted.candidates:
            return predicted
        current = asked.get("current")
        ranked = sorted(map(self._simulated, predicted.candidates), key=lambda c: (len(c.violated), c.makespan_s))
        horizon = asked.get("remaining_fraction", 1.0) + asked.get("steps_ahead", STEPS_AHEAD)
        chosen, reason = ranked[0], Reason.BEST
        kept = next((c for c in ranked if c.configuration == current and c.feasible), None)
        if kept is not None:
            cost_s = switch_between(current, chosen.configuration, self.costs).cost_s
            if (kept.makespan_s - chosen.makespan_s) * horizon <= cost_s:
                chosen, reason = kept, Reason.ALREADY_BEST
        switch = switch_between(current, chosen.configuration, self.costs)
        return replace(
            predicted,
            selected=chosen.configuration,
            reason=reason,
            candidates=tuple(ranked),
            predicted_s=chosen.makespan_s,
            switch=switch.kind,
            switching_cost_s=switch.cost_s,
        )

    def _simulated(self, candidate: Candidate) -> Candidate:
        configuration = candidate.configuration
        if configuration not in self._known:
            found = simulated_makespans(self.batches, [configuration], self.model, stable_fraction=self.stable_fraction)
            self._known.update(found)
        return replace(candidate, predicted=candidate.predicted._replace(total_s=self._known[configuration]))
