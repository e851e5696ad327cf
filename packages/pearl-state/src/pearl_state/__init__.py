"""PEARL's vocabulary: the unified GPU-worker-role table, its events, effects, plans and decisions. No dependencies."""

from pearl_state.configuration import Configuration
from pearl_state.decision import Candidate, Constraint, Decision, MakespanTerms, Reason, SwitchKind
from pearl_state.errors import ConfigurationError, IllegalTransitionError, InvariantError, ProfileError, StateError
from pearl_state.lifecycle import Lifecycle
from pearl_state.plan import PlanId, Stage, TransitionPlan
from pearl_state.profile import PlatformProfile, WorkloadProfile
from pearl_state.roles import Activity, Mode, Role, Tenure, Zone
from pearl_state.samples import DecodeSample, EngineSamples, PrefillSample, TransferSample, TurnSample
from pearl_state.table import WorkerTable
from pearl_state.trajectory import Trajectory, Turn, WeightSpan
from pearl_state.worker import GpuId, Worker, WorkerId

__all__ = [
    "Activity",
    "Candidate",
    "Configuration",
    "ConfigurationError",
    "Constraint",
    "Decision",
    "DecodeSample",
    "EngineSamples",
    "GpuId",
    "IllegalTransitionError",
    "InvariantError",
    "Lifecycle",
    "MakespanTerms",
    "Mode",
    "PlanId",
    "PlatformProfile",
    "PrefillSample",
    "ProfileError",
    "Reason",
    "Role",
    "Stage",
    "StateError",
    "SwitchKind",
    "Tenure",
    "Trajectory",
    "TransferSample",
    "TransitionPlan",
    "Turn",
    "TurnSample",
    "WeightSpan",
    "Worker",
    "WorkerId",
    "WorkerTable",
    "WorkloadProfile",
    "Zone",
]
