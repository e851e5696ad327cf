"""What happened, in the past tense. Every event carries when: the core reads no clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pearl_state.configuration import Configuration
from pearl_state.decision import ScalingReason
from pearl_state.plan import NO_PLAN, PlanId
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Tenure
from pearl_state.worker import GpuId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    now_s: float
    """Seconds on the run's clock."""


# ---- inter-scale: GPUs come and go ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusOffered(_Event):
    """The provider gave rollout GPUs on one node."""

    gpus: frozenset[GpuId]
    tenure: Tenure = Tenure.PREEMPTIBLE
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusReclaimed(_Event):
    """The provider wants GPUs back by `deadline_s` (absolute). A deadline in the past means they are gone."""

    gpus: frozenset[GpuId]
    deadline_s: float


# ---- intra-scale: training begins and ends --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequested(_Event):
    """A batch is complete: training wants its GPUs now (the paper's Training Begin)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFinished(_Event):
    """An update is done; the training GPUs are idle until the next batch (the paper's Training Finished)."""

    weight_version: int
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReleased(_Event):
    """Training workers gave their device memory back (verified), or could not (`failed`: the cause)."""

    plan_id: PlanId
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResumed(_Event):
    """Training workers hold their device memory again, or could not take it (`failed`: the cause)."""

    plan_id: PlanId = NO_PLAN
    """Of the `ResumeTraining` that it answers."""
    failed: str | None = None


# ---- answers of the executors ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrepared(_Event):
    """All workers of an expansion or a borrow are up and hold the weights they report."""

    plan_id: PlanId
    reported: Mapping[WorkerId, int]
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed(_Event):
    """An expansion or borrow was given up (all or nothing) and cleaned: nothing of it is left.

    `failed` names the workers at fault with the cause; empty where it was cancelled.
    """

    plan_id: PlanId
    failed: Mapping[WorkerId, str] = field(default_factory=dict[WorkerId, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageApplied(_Event):
    """A stage's drains, releases, switches and weight checks are over."""

    plan_id: PlanId
    stage: int
    reported: Mapping[WorkerId, int]
    """Weight version of each worker that may be admitted."""
    left: frozenset[WorkerId] = frozenset()
    """Workers that gave their GPUs back as told."""
    failed: Mapping[WorkerId, str] = field(default_factory=dict[WorkerId, str])
    """Workers that did not do what they should, with the cause. They may still hold the GPU."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersCleaned(_Event):
    """Failed workers were killed; their GPUs hold nothing of them any more."""

    workers: Mapping[WorkerId, int]
    """Worker → the incarnation that was cleaned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed(_Event):
    """A worker crashed or stopped answering outside a plan."""

    worker: WorkerId
    incarnation: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(_Event):
    """Training published a newer weight version."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReported(_Event):
    """A worker said which weight version it holds now."""

    worker: WorkerId
    incarnation: int
    version: int


# ---- rollout and its telemetry --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBegan(_Event):
    """A batch of `batch` trajectories started."""

    step: int
    batch: int
    continuous: bool = False
    """Whether trajectories of other batches are under way beside it: groups enter whenever they may."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a batch below 0: a journal may be a stranger's."""
        if self.batch < 0:
            raise ValueError(f"RolloutBegan.batch = {self.batch}: must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgressed(_Event):
    """`remaining` trajectories of the batch are not complete yet (R of eq. 7). Raises `ValueError` below 0."""

    step: int
    remaining: int

    def __post_init__(self) -> None:
        """A journal may be a stranger's."""
        if self.remaining < 0:
            raise ValueError(f"RolloutProgressed.remaining = {self.remaining}: must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFinished(_Event):
    """The last trajectory of a batch completed."""

    step: int
    makespan_s: float
    borrowed: bool = False
    """Whether borrowed GPUs served during the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRefitted(_Event):
    """Telemetry produced a new workload and platform profile."""

    workload: WorkloadProfile
    platform: PlatformProfile
    calibrated: bool = True
    """Whether measurements back the platform profile (else it is still the prior)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadForecast(_Event):
    """What the next `horizon_s` seconds ask of both roles (Prorsa section 4), in full-prompt tokens."""

    horizon_s: float
    """S."""
    prefill_tokens: float
    """W^P: prompts that wait, are served, or are predicted to arrive."""
    admitted_tokens: float
    """A^D: prompts predicted to be admitted to decode."""
    decode_kv_bytes: float
    """K^D + K̂^D: KV in decode now and of the predicted admissions."""
    prefill_tokens_per_s: float
    """θ^P of one prefill worker, full-prompt tokens per busy second."""
    backlog_tokens: float = 0.0
    """Part of `prefill_tokens` that waits or is served already."""
    resident_kv_bytes: float = 0.0
    """K^D: part of `decode_kv_bytes` that is in decode already."""
    live: int = 0
    """Trajectories that are not complete."""
    arriving_tokens_per_s: float = 0.0
    """θ^P for the part of `prefill_tokens` that is not there yet, of which another part may be cached; 0 where unknown:
    then it is as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessMeasured(_Event):
    """The boundary after an update: how ready the data is, and what follows from that (TideRL section 5.2)."""

    step: int
    """The step that ended; 0 before the first."""
    reason: ScalingReason
    volume: int
    """Trajectories that the step consumed and that are ready now."""
    ready: int
    """Trajectories of complete groups."""
    interval_s: float = 0.0
    """Mean time between two complete groups (TPRM, a group being a micro-batch); 0 before there were two."""
    group_s: float = 0.0
    """What training took for a group in the step that ended."""
    head_of_line_s: float = 0.0
    """How long the oldest complete group has waited."""
    step_s: float = 0.0
    """Mean duration of a step; 0 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFinished(_Event):
    """All episodes of an evaluation of one weight version are over."""

    version: int
    episodes: int
    """Those with a reward."""
    failed: int
    """Those without: the infrastructure failed them, or they took too long."""
    reward_mean: float
    """0 where no episode has a reward."""
    duration_s: float


# ---- people ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersCordoned(_Event):
    """A person fenced workers off (`cordoned`), or lifted the fence."""

    workers: frozenset[WorkerId]
    cordoned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationPinned(_Event):
    """A person fixed the configuration; None lets the policy choose again."""

    configuration: Configuration | None


# ---- the control plane itself ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(_Event):
    """A control plane goes on where another one ended. No rollout process is left; training holds its GPUs.

    Times of later events are on the clock of the new one.
    """

    weight_version: int
    """What training calls its weights now; not older than any that was published."""


Event = (
    GpusOffered
    | GpusReclaimed
    | TrainingRequested
    | TrainingFinished
    | TrainingReleased
    | TrainingResumed
    | GroupPrepared
    | GroupFailed
    | StageApplied
    | WorkersCleaned
    | WorkerFailed
    | WeightsPublished
    | WeightsReported
    | RolloutBegan
    | RolloutProgressed
    | RolloutFinished
    | ProfileRefitted
    | LoadForecast
    | ReadinessMeasured
    | EvaluationFinished
    | WorkersCordoned
    | ConfigurationPinned
    | RunResumed
)
