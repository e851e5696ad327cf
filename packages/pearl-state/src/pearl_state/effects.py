"""What the shell must do, in the imperative. Each comes back as an event; each has a bounded end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pearl_state.decision import Decision
from pearl_state.plan import NO_PLAN, PlanId, TransitionPlan
from pearl_state.roles import Role
from pearl_state.worker import GpuId, Worker, WorkerId


class GroupKind(StrEnum):
    """Why a group of workers is prepared."""

    EXPANSION = "expansion"
    """New processes on dedicated GPUs (Inter-Scale Cluster Rebuilder)."""
    BORROW = "borrow"
    """Retained processes on training GPUs (Intra-Scale Toggle Manager)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareGroup:
    """Start or resume workers in the background and bring them to the newest weights, all or nothing.

    Answer: `GroupPrepared` or, with everything cleaned, `GroupFailed`.
    """

    plan_id: PlanId
    kind: GroupKind
    workers: tuple[Worker, ...]
    """Rows as they stand in the table now, with the role each is to start in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelGroup:
    """Give a preparation up and clean it. Answer: `GroupFailed` with nobody at fault."""

    plan_id: PlanId


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyStage:
    """Drain and release those who leave, drain and switch those who change role, check versions of those who join.

    Everybody named was withdrawn from routing before this effect is seen. Answer: `StageApplied`.
    """

    plan_id: PlanId
    stage: int
    leave: tuple[Worker, ...] = ()
    """Zone OVERLAP: release and keep the process. Zone DEDICATED: end the process."""
    switch: Mapping[WorkerId, Role] = field(default_factory=dict[WorkerId, Role])
    admit: tuple[Worker, ...] = ()
    """Rows that shall serve afterwards (with their new roles): bring each to `target_version` and report."""
    target_version: int = 0
    deadline_s: float | None = None
    """Absolute time by which `leave` must be gone; past it they are killed."""
    mandatory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeights:
    """Bring serving workers to `version` (in place; generation goes on). Answers: `WeightsReported`, `WorkerFailed`."""

    workers: tuple[Worker, ...]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanWorkers:
    """Kill failed workers for good. Answer: `WorkersCleaned`."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTraining:
    """Have training give its device memory back, verified. Answer: `TrainingReleased`."""

    plan_id: PlanId
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTraining:
    """Have training take its device memory again. Answer: `TrainingResumed`."""

    workers: tuple[Worker, ...]
    plan_id: PlanId = NO_PLAN


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantTraining:
    """All training GPUs are held by training: the update may run. No answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnGpus:
    """Tell the provider that nothing of ours is left on these GPUs. No answer."""

    gpus: frozenset[GpuId]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordDecision:
    """Keep a decision for people and for comparison with what is measured. No answer."""

    decision: Decision
    trigger: str
    """Name of the event that led to it."""
    plan: TransitionPlan | None = None
    borrowed: bool = False
    """Whether the budget includes borrowed training GPUs."""
    gate: Mapping[str, float] | None = None
    """For a borrowing decision: the terms of eq. (7), and `open` as 0 or 1."""


Effect = (
    PrepareGroup
    | CancelGroup
    | ApplyStage
    | SyncWeights
    | CleanWorkers
    | ReleaseTraining
    | ResumeTraining
    | GrantTraining
    | ReturnGpus
    | RecordDecision
)
