"""What the Elastic Scheduler knows: one immutable state, of which every event makes the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pearl_planner.gate import ToggleCosts
from pearl_planner.policies import Policy
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision, ScalingReason
from pearl_state.effects import Effect, GroupKind
from pearl_state.events import LoadForecast
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId, TransitionPlan
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Role, Tenure, Zone
from pearl_state.table import WorkerTable
from pearl_state.worker import GpuId, Worker, WorkerId

FIRST_PLAN: Final = PlanId(1)


class Borrowing(StrEnum):
    """Whether idle training GPUs are lent to rollout."""

    OFF = "off"
    UNGATED = "ungated"
    """Always, whatever it costs."""
    GATED = "gated"
    """Only where eq. (7) says that it pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSettings:
    """What a person chose. `policy` decides; the rest bounds it."""

    policy: Policy
    gpus_per_worker: int = 1
    """Tensor-parallel degree: GPUs of one rollout worker."""
    borrowing: Borrowing = Borrowing.GATED
    return_s: float = 30.0
    """Training waits at most this long for borrowed GPUs; what has not left by then is killed."""
    max_restarts: int = 3
    """A slot that failed more often is retired."""
    min_healthy: int = 0
    """A slot is not retired where that would leave fewer than so many rollout slots: it is started again instead."""
    expansion_workers: int = 64
    """Most workers of one group of an expansion, at least 1. A group is ready as a whole or not at all, so that of a
    thousand workers that are prepared in one, a few that fail would keep all the others from serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Workers that are being prepared together and will be admitted together or not at all."""

    kind: GroupKind
    workers: frozenset[WorkerId]
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPlan:
    """The plan in progress: `stage` is being applied."""

    plan: TransitionPlan
    stage: int = 0
    overtaken: bool = False
    """A worker was lost or is leaving: after this stage the rest of the plan is dropped."""
    lost: frozenset[WorkerId] = frozenset()
    """Workers of the stage that failed meanwhile: its answer does not concern them, nor who has their slots by then."""

    @property
    def busy(self) -> frozenset[WorkerId]:
        """Workers of the current stage."""
        stage = self.plan.stages[self.stage]
        return stage.withdraw | stage.admit


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticState:
    """Everything the next decision depends on."""

    settings: ElasticSettings
    table: WorkerTable
    workload: WorkloadProfile
    platform: PlatformProfile
    calibrated: bool = False
    """Whether measurements back the profiles."""
    toggle_costs: ToggleCosts = field(default_factory=ToggleCosts)
    available: frozenset[WorkerId] = frozenset()
    """Dedicated slots whose GPUs we hold and were not asked back."""
    loose: Mapping[str, frozenset[GpuId]] = field(default_factory=dict[str, frozenset[GpuId]])
    """Node → GPUs too few for a worker."""
    doomed: Mapping[WorkerId, frozenset[GpuId]] = field(default_factory=dict[WorkerId, frozenset[GpuId]])
    """Slots whose GPUs were asked back, until they are gone → which of their GPUs."""
    groups: Mapping[PlanId, Group] = field(default_factory=dict[PlanId, Group])
    lost: frozenset[WorkerId] = frozenset()
    """Workers of a group that were lost after they came up, until the group's answer is in."""
    smaller_groups: int | None = None
    """Most workers of a group of an expansion after groups failed: half of what failed, and one more with each that
    comes up, until it is what the settings say again (None)."""
    removals: Mapping[PlanId, frozenset[WorkerId]] = field(default_factory=dict[PlanId, frozenset[WorkerId]])
    """Mandatory removals under way."""
    running: RunningPlan | None = None
    releasing: PlanId | None = None
    """Training is giving its memory back for a borrow."""
    resuming: PlanId | None = None
    """Training is taking its memory again."""
    training_wanted: bool = False
    """A batch is complete; training runs or waits for its GPUs."""
    training_running: bool = False
    """Training was granted its GPUs and has not finished."""
    lend_refused: bool = False
    """The gate said no, or a borrow failed: not tried again before the next window or a smaller budget."""
    step: int = 0
    batch: int = 0
    continuous: bool = False
    """Whether batches overlap: then the workload's batch is what is in flight, whichever step it is for."""
    remaining: int = 0
    """R: trajectories of the batch that are not complete."""
    reconsider: bool = False
    """A signal came while a plan was running: decide again when it is over."""
    forecasts: tuple[LoadForecast, ...] = ()
    """The newest forecasts since the newest plan for the ratio began, oldest first."""
    readiness: ScalingReason | None = None
    """What the newest boundary after an update said of the data; None where nobody measures it."""
    pinned: Configuration | None = None
    next_plan: PlanId = FIRST_PLAN
    last_decision: Decision | None = None

    @property
    def group_workers(self) -> int:
        """Most workers that a group of an expansion has now."""
        most = self.settings.expansion_workers
        return most if self.smaller_groups is None else min(most, self.smaller_groups)

    @property
    def lent(self) -> bool:
        """Whether training GPUs are at rollout's disposal now."""
        return not self.training_wanted and all(
            self.table.rows[id_].lifecycle is Lifecycle.RELEASED for id_ in self.table.training()
        )


Step = tuple[ElasticState, tuple[Effect, ...]]


def initial_state(
    *,
    settings: ElasticSettings,
    workload: WorkloadProfile,
    platform: PlatformProfile,
    training_gpus: int,
    weight_version: int = 0,
    toggle_costs: ToggleCosts | None = None,
) -> ElasticState:
    """The state before anything happened: training holds its GPUs, and overlap slots wait over them.

    Training GPUs are numbered 0 to `training_gpus` - 1, one training worker each. Overlap workers take
    `gpus_per_worker` of them each; a remainder is never lent. Rollout GPUs come as `GpusOffered`.
    """
    training = [
        Worker(id=WorkerId(i), gpus=frozenset({GpuId(i)}), role=Role.TRAINING, zone=Zone.OVERLAP)
        for i in range(training_gpus)
    ]
    size = settings.gpus_per_worker
    overlap = [
        Worker(
            id=WorkerId(training_gpus + i),
            gpus=frozenset(GpuId(g) for g in range(i * size, (i + 1) * size)),
            role=Role.COLOCATED,
            zone=Zone.OVERLAP,
            tenure=Tenure.RESERVED,
        )
        for i in range(training_gpus // size if settings.borrowing is not Borrowing.OFF else 0)
    ]
    table = WorkerTable().bind(*training, *overlap).publish(weight_version)
    ids = [w.id for w in training]
    for lifecycle in (Lifecycle.STARTING, Lifecycle.PENDING_WEIGHTS):
        table = table.move(ids, lifecycle)
    table = table.move(ids, Lifecycle.ACTIVE)
    return ElasticState(
        settings=settings,
        table=table,
        workload=workload,
        platform=platform,
        toggle_costs=toggle_costs or ToggleCosts(),
    )
