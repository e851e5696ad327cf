"""A policy of one's own: half of the workers prefill, whatever the model says; a batch of few turns is colocated."""

from dataclasses import dataclass
from typing import Any

from pearl_planner import decide
from pearl_state import Configuration, Decision, WorkloadProfile


@dataclass(frozen=True)
class HalfPrefill:
    name: str = "half-prefill"  # in decisions and traces; where a policy is chosen, module:attribute
    expands: bool = True  # takes preemptible GPUs
    borrows: bool = True  # borrows idle training GPUs
    least_turns: float = 4.0

    def decide(self, *, workload: WorkloadProfile, budget_workers: int, pinned: Any = None, **given: Any) -> Decision:
        """As `pearl_planner.decide`, which also predicts the makespan of what we hold."""
        held = Configuration(colocated=budget_workers)
        if budget_workers >= 2 and workload.turns >= self.least_turns:
            half = budget_workers // 2
            held = Configuration(prefill=half, decode=budget_workers - half)
        if budget_workers == 0:
            held = None
        return decide(workload=workload, budget_workers=budget_workers, pinned=pinned or held, **given)


policy = HalfPrefill()
