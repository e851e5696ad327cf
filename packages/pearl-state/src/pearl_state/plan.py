"""A transition plan: the one format that both executors consume (PEARL section 4.4.2)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NewType

from pearl_state.configuration import Configuration
from pearl_state.roles import Role
from pearl_state.worker import WorkerId

PlanId = NewType("PlanId", int)
"""Grows with each plan of a run; an answer that carries the id of a cancelled plan is void."""

NO_PLAN: Final = PlanId(0)
"""The number of no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Changes that are applied together. All of `withdraw` leaves routing at once, all of `admit` enters it at once.

    Between the two, `leave` gives its GPUs back and `switch` changes its role; a worker in `withdraw` that does
    neither is only parked (its counterpart role is missing until the admission).
    """

    leave: frozenset[WorkerId] = frozenset()
    """Part of W_remove."""
    switch: Mapping[WorkerId, Role] = field(default_factory=dict[WorkerId, Role])
    """Part of ρ: survivors and their new roles."""
    park: frozenset[WorkerId] = frozenset()
    """Survivors that keep their role but cannot serve until this stage is done."""
    join: Mapping[WorkerId, Role] = field(default_factory=dict[WorkerId, Role])
    """Part of W_add: prepared workers that are admitted at the end of this stage."""

    @property
    def withdraw(self) -> frozenset[WorkerId]:
        """Workers that leave routing when the stage begins."""
        return self.leave | self.switch.keys() | self.park

    @property
    def admit(self) -> frozenset[WorkerId]:
        """Workers that serve when the stage ends."""
        return frozenset(self.switch.keys() | self.park | self.join.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionPlan:
    """(W_add, W_remove, ρ) and the order in which to carry it out."""

    id: PlanId
    target: Configuration
    add: Mapping[WorkerId, Role] = field(default_factory=dict[WorkerId, Role])
    """W_add with the role each joins in."""
    remove: frozenset[WorkerId] = frozenset()
    """W_remove."""
    reassign: Mapping[WorkerId, Role] = field(default_factory=dict[WorkerId, Role])
    """ρ: survivors that change role."""
    stages: tuple[Stage, ...] = ()
    """In order. After each `withdraw` and each `admit`, prefill and decode workers are paired."""
    mandatory: bool = False
    """Whether it returns GPUs that others wait for: it has a deadline and cancels optional work in its way."""
    deadline_s: float | None = None
    """Absolute time by which `remove` must have given its GPUs back."""

    @property
    def changes(self) -> int:
        """D_worker + D_role of PEARL eqs. (5) and (6)."""
        return len(self.add) + len(self.remove) + len(self.reassign)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {
            "id": self.id,
            "target": str(self.target),
            "add": {str(w): str(r) for w, r in sorted(self.add.items())},
            "remove": sorted(self.remove),
            "reassign": {str(w): str(r) for w, r in sorted(self.reassign.items())},
            "stages": [
                {
                    "leave": sorted(s.leave),
                    "switch": {str(w): str(r) for w, r in sorted(s.switch.items())},
                    "park": sorted(s.park),
                    "join": {str(w): str(r) for w, r in sorted(s.join.items())},
                }
                for s in self.stages
            ],
            "mandatory": self.mandatory,
            "deadline_s": self.deadline_s,
        }
