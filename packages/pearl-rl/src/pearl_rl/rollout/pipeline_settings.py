"""What a pipeline is to make, within which bounds, and what it made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pearl_rl.rollout.batch_rollout import RefillLimits
from pearl_rl.rollout.counts import BufferCounts


class UpdateTimeoutError(TimeoutError):
    """An update took longer than it may."""


class RolloutTimeoutError(TimeoutError):
    """A batch took longer than it may; the message says what it still waited for."""


class EndReason(StrEnum):
    """Why a pipeline ended."""

    STEPS = "steps"
    """All steps are made."""
    WALL_LIMIT = "wall_limit"
    STOPPED = "stopped"
    """`stop` was called."""


class Injection(StrEnum):
    """When new groups are dispatched."""

    BATCH = "batch"
    """A whole batch at a time, once the one before it is complete (PEARL section 4.1)."""
    CONTINUOUS = "continuous"
    """Each as soon as the staleness bound allows (TideRL section 4.1); see `rollout.continuous`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """What the pipeline makes, and the bounds of its waits."""

    steps: int
    """Training steps over the whole run, those of `completed_steps` included."""
    groups_per_step: int
    group_size: int
    max_staleness: int = 1
    """Most weight versions between dispatch and use; 0 makes rollout wait for each update."""
    injection: Injection = Injection.BATCH
    straggler_patience: float = math.inf
    """With continuous injection: how many mean step times an update waits for samples that it would make too old,
    before it gives them up and trains on the rest of their groups. Infinity: nothing is ever given up."""
    seed: int = 0
    wall_limit_s: float = math.inf
    """No batch begins after this many seconds; the one under way is finished and trained on."""
    completed_steps: int = 0
    """Steps that earlier runs made: a resumed run goes on with the next one."""
    seeding_s: float = math.inf
    """With batches at a time: training asks for its GPUs so long after it began to wait for a batch, complete or not
    (RLBoost's seeding window). Infinity: once one is complete."""
    batch_s: float = 3600.0
    """Longest that one batch may take."""
    grant_s: float = 300.0
    """Longest that training may wait for its GPUs."""
    update_s: float = 3600.0
    """Longest that one update may take."""
    max_refills_per_group: int = 64
    refill: RefillLimits = field(default_factory=RefillLimits)

    @property
    def batch(self) -> int:
        """B: trajectories of a step."""
        return self.groups_per_step * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOutcome:
    """What a run of the pipeline amounts to."""

    reason: EndReason
    steps: int
    """Steps that this run completed."""
    version: int
    """The trainer's weight version at the end."""
    counts: BufferCounts
    """What became of every dispatched trajectory."""
    rewards: tuple[float, ...]
    """Mean reward of each step's batch."""
    generated_tokens: int
    trained_tokens: int
    wait_bound_s: float
    """How long rollout waited for the staleness bound, seconds."""
    wait_grant_s: float
    """How long training waited for its GPUs, seconds."""
    wall_s: float
    failures: Mapping[str, int]
    """Why trajectories were dispatched again → how often."""
