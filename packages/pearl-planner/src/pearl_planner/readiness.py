"""Elastic Resource Scaling: GPUs move to the side that waits, as TideRL section 5.2. Pure.

At the boundary after each update, before the new weights are broadcast, the buffer says how ready the data is:

- *generation deficit*: it had less than B_ideal for the step. The trainer would starve: reference and actor share GPUs
  (colocated) and the reference's go to rollout.
- *consumption deficit*: its oldest micro-batch waited longer than τ·T_step, or RAS is beyond the break-even of the
  decoupled mode. Rollout would stall, so a rollout rank becomes the trainer's reference rank (decoupled).

Both speak of one boundary. Where it is known what splits waited over their steps (`split_waits`), nobody moves while
nothing waits, nor to a split that waited more, and a rank goes back to one that waited less.

A cold start or an evaluation sends everything to rollout at once, but for the ranks that the trainer needs to be
through with its batch by the time that rollout is: with fewer it would be the trainer that all wait for. After a
scale-down of rollout the trainer takes less than it could, down to B_min (adaptive retention), so that rollout catches
up.

`decide_scaling` is the whole decision, for trainers whose ranks may come and go between updates (`simulation`). In a
run the ranks of training are fixed, and what moves is who has their GPUs between two updates: `lends` says so of the
reason, `reconcile.lend` carries it out over the one table and in the one plan format. Either way a move costs what the
same `ToggleCosts` account says.
"""

from dataclasses import dataclass

from pearl_planner.gate import ToggleCosts
from pearl_planner.ref_actor import MicroBatchCosts, RefActorMode, fastest_references
from pearl_planner.split_waits import WaitMemory
from pearl_state.decision import ScalingReason


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInterval:
    """[B_min, B_ideal] of elastic batching, in trajectories: any volume between them makes a step."""

    minimum: int
    """Least that makes an effective step."""
    ideal: int
    """What fills the trainer's memory and compute."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.ideal:
            raise ValueError(f"batch interval [{self.minimum}, {self.ideal}]: needs 1 <= minimum <= ideal")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessSettings:
    """Bounds of scaling."""

    batch: BatchInterval
    head_of_line_factor: float = 1.0
    """τ: the oldest ready micro-batch may wait this many steps."""
    min_rollout_ranks: int = 1
    min_actor_ranks: int = 1
    max_trainer_growth: int = 1
    """Ranks that the trainer gains in one step, at most (section 6.3: plans are conservative). What it lent for a cold
    start or an evaluation comes back at once."""
    retention_steps: int = 2
    """Steps after a scale-down of rollout in which the trainer paces itself."""
    hidden_s: float = 3.0
    """Duration of the weight broadcast, under which a role switch hides."""
    least_saving: float = 0.05
    """Part of a step that must be waited for a rank to move, and that another split waited less for it to go back."""


def fixed_batch(trajectories: int) -> ReadinessSettings:
    """Bounds of a trainer that always takes as many: there is nothing between B_min and B_ideal."""
    return ReadinessSettings(batch=BatchInterval(minimum=trajectories, ideal=trajectories))


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferReadiness:
    """The global buffer at the post-update boundary, and what led there."""

    volume: int
    """Trajectories that the buffer had for the step that ended: those it consumed, and those that are ready now."""
    ready: int
    """Trajectories that are ready now."""
    ras: int
    """Micro-batches that are ready at the start of the next step (N0)."""
    tprm_s: float
    """Interval at which further ones become ready, smoothed over steps."""
    head_of_line_s: float
    """How long the oldest ready micro-batch has waited."""
    step_s: float
    """Average duration of a step (T_step)."""
    micro_batch_s: float = 0.0
    """What the trainer takes for a micro-batch; 0: not known."""
    micro_batches: int = 0
    """Of a full batch (N); 0: not known."""
    break_even_ras: int | None = None
    """RAS from which on decoupled mode is faster (`ref_actor.break_even_ras`); None: it never is."""
    cold_start: bool = False
    """No step was made yet."""
    evaluating: bool = False
    """Evaluation tasks are about to run beside the next step."""
    evaluation_load: float = 0.0
    """Micro-batches as whose rollout those tasks count; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSplit:
    """Who has how many ranks."""

    rollout: int
    actor: int
    reference: int = 0
    """Ranks that only run the reference; 0 in colocated mode."""

    @property
    def total(self) -> int:
        """All ranks; scaling never changes it."""
        return self.rollout + self.actor + self.reference

    @property
    def mode(self) -> RefActorMode:
        """Decoupled where the reference has ranks of its own."""
        return RefActorMode.DECOUPLED if self.reference else RefActorMode.COLOCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """The split of the next step."""

    split: RankSplit
    reason: ScalingReason
    fetch: int
    """Trajectories the next step takes at most (B_min … B_ideal)."""
    exposed_s: float = 0.0
    """What the move costs beyond the broadcast it hides under, seconds."""
    paced_steps: int = 0
    """Steps for which the trainer still paces itself."""
    lent: RankSplit | None = None
    """The split that was given up for a cold start or an evaluation; the next decision goes on from it."""

    @property
    def mode(self) -> RefActorMode:
        """How reference and actor share the trainer's ranks."""
        return self.split.mode


def generation_deficit(buffer: BufferReadiness, batch: BatchInterval) -> int:
    """Trajectories by which the global batch fell short of B_ideal."""
    return max(0, batch.ideal - buffer.volume)


def starving(buffer: BufferReadiness) -> bool:
    """Whether the trainer waits for each micro-batch: none is ready, and they come slower than it takes them."""
    return buffer.ras == 0 and 0.0 < buffer.micro_batch_s < buffer.tprm_s


def consumption_deficit(buffer: BufferReadiness, settings: ReadinessSettings) -> bool:
    """Whether the trainer cannot keep up: HoL latency above τ·T_step, or RAS at the break-even or beyond.

    A buffer that lacks anything of B_ideal has no backlog, whatever its oldest entry's age.
    """
    if generation_deficit(buffer, settings.batch):
        return False
    waits = buffer.head_of_line_s > settings.head_of_line_factor * buffer.step_s
    return waits or (buffer.break_even_ras is not None and buffer.ras >= max(1, buffer.break_even_ras))


def scaling_reason(buffer: BufferReadiness, settings: ReadinessSettings) -> ScalingReason:
    """Who should have more GPUs in the next step. A cold start or an evaluation pre-empts both deficits."""
    if buffer.cold_start:
        return ScalingReason.COLD_START
    if buffer.evaluating:
        return ScalingReason.EVALUATION
    if generation_deficit(buffer, settings.batch) or starving(buffer):
        return ScalingReason.GENERATION_DEFICIT
    if consumption_deficit(buffer, settings):
        return ScalingReason.CONSUMPTION_DEFICIT
    return ScalingReason.BALANCED


def lends(reason: ScalingReason | None) -> bool | None:
    """Whether idle training GPUs go to rollout for this reason alone; None where eq. (7) of PEARL is to say."""
    if reason is None or reason is ScalingReason.BALANCED:
        return None
    return reason is not ScalingReason.CONSUMPTION_DEFICIT


def decide_scaling(
    buffer: BufferReadiness,
    split: RankSplit,
    settings: ReadinessSettings,
    *,
    costs: ToggleCosts | None = None,
    paced_steps: int = 0,
    lent: RankSplit | None = None,
    training: MicroBatchCosts | None = None,
    waits: WaitMemory | None = None,
) -> ScalingDecision:
    """The split, mode and fetch size of the next step. `paced_steps` and `lent` are what the decision before returned.

    `training` is what a micro-batch costs on one rank, by which a rank that rollout gives up is the reference's or the
    actor's; without it the first one is always the reference's. `waits` is what splits waited in normal steps so far.
    Never moves more than `max_trainer_growth` ranks to the trainer at a time, nor below a side's least; what rollout
    gives up it gives to a reference rank first, then to the actor.
    """
    costs = costs or ToggleCosts()
    batch = settings.batch
    current, split = split, lent or split
    preempts = buffer.cold_start or buffer.evaluating
    signal = scaling_reason(buffer, settings)
    up = _more_rollout(buffer, split, settings, remembered=signal is ScalingReason.BALANCED)
    down = _more_training(buffer, split, settings, training)
    reason = signal
    if waits is not None and not preempts:
        reason = _weighed(signal, waits, settings, here=split.rollout, up=up.rollout, down=down.rollout)
    match reason:
        case ScalingReason.COLD_START | ScalingReason.EVALUATION:
            target = _most_rollout(buffer, split, current, settings)
        case ScalingReason.GENERATION_DEFICIT:
            target = up
        case ScalingReason.CONSUMPTION_DEFICIT:
            target = down
        case ScalingReason.BALANCED:
            target = split
    shrank = target.rollout < split.rollout and signal is ScalingReason.CONSUMPTION_DEFICIT
    paced = settings.retention_steps if shrank else max(0, paced_steps - 1)
    moved = target.rollout != current.rollout
    return ScalingDecision(
        split=target,
        reason=reason,
        fetch=_fetch(buffer, batch, paced),
        exposed_s=max(0.0, costs.toggle_s - settings.hidden_s) if moved else 0.0,
        paced_steps=paced,
        lent=split if preempts else None,
    )


def _weighed(
    signal: ScalingReason, waits: WaitMemory, settings: ReadinessSettings, *, here: int, up: int, down: int
) -> ScalingReason:
    """What the signal says in the light of what the splits waited: this one, of `here` rollout ranks, and those that a
    deficit of generation (`up`) and of consumption (`down`) lead to.

    A deficit foretells a wait: where there is none to save, or where it would lead to more, nobody moves.
    """
    if signal is ScalingReason.BALANCED:
        more, less = waits.saves(here, up) or 0.0, waits.saves(here, down) or 0.0
        if max(more, less) <= settings.least_saving:
            return signal
        return ScalingReason.GENERATION_DEFICIT if more >= less else ScalingReason.CONSUMPTION_DEFICIT
    part, towards = waits.part(here), waits.saves(here, up if signal is ScalingReason.GENERATION_DEFICIT else down)
    idle = part is not None and part < settings.least_saving
    return ScalingReason.BALANCED if idle or (towards is not None and towards < 0.0) else signal


def _most_rollout(
    buffer: BufferReadiness, split: RankSplit, current: RankSplit, settings: ReadinessSettings
) -> RankSplit:
    """As many ranks as rollout can have before the trainer is the slower side; all but the least where that is unknown.

    By RAS and TPRM, which were measured on `current`: what is lacking of a batch and the evaluation's tasks come at an
    interval that shrinks with rollout's ranks, and a micro-batch takes the longer the fewer ranks train.
    """
    least = settings.min_actor_ranks
    ranks = split.actor + split.reference
    train_s = buffer.micro_batch_s * (current.actor + current.reference) * buffer.micro_batches
    roll_s = buffer.tprm_s * current.rollout * (max(0, buffer.micro_batches - buffer.ras) + buffer.evaluation_load)
    if train_s and roll_s:
        while least < ranks and train_s / least > roll_s / (split.total - least):
            least += 1
    return RankSplit(rollout=split.total - least, actor=least)


def _more_rollout(
    buffer: BufferReadiness, split: RankSplit, settings: ReadinessSettings, *, remembered: bool = False
) -> RankSplit:
    """Reference ranks go to rollout; without any, one of the actor's where the trainer starves, or waited less so."""
    freed = split.reference
    actor = split.actor
    short = remembered or buffer.volume < settings.batch.minimum or starving(buffer)
    if not freed and short and actor > settings.min_actor_ranks:
        actor -= 1
        freed = 1
    return RankSplit(rollout=split.rollout + freed, actor=actor)


def _more_training(
    buffer: BufferReadiness, split: RankSplit, settings: ReadinessSettings, training: MicroBatchCosts | None
) -> RankSplit:
    moved = min(settings.max_trainer_growth, split.rollout - settings.min_rollout_ranks)
    if moved <= 0:
        return split
    ranks = split.actor + split.reference + moved
    if training is None:
        reference = split.reference or 1
    else:
        reference = fastest_references(max(1, buffer.micro_batches), training, ranks)
    if ranks - reference < settings.min_actor_ranks:
        reference = 0
    return RankSplit(rollout=split.rollout - moved, actor=ranks - reference, reference=reference)


def _fetch(buffer: BufferReadiness, batch: BatchInterval, paced_steps: int) -> int:
    """B_ideal; while pacing only so much that half of what is ready stays, but never less than B_min."""
    if not paced_steps:
        return batch.ideal
    return min(batch.ideal, max(batch.minimum, buffer.ready // 2))
