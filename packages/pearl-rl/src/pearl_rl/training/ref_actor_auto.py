"""`train.ref_actor = "auto"`: each update in the mode that TideRL's cost models choose (section 5.1, appendix A).

What is chosen among is what the job's GPUs allow: all of them hold both models and swap (colocated), or the last one
holds the reference alone (decoupled). An update begins when its batch is complete, so RAS is all of its micro-batches.
No torch here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Protocol

from pearl_planner.ref_actor import RefActorMode
from pearl_planner.update_mode import ModeCosts, PassCosts, UpdateLoad, UpdateMode, decide_update_mode
from pearl_rl.training.batch import MicroBatch, MiniBatch, TrainBatch, plan_update
from pearl_rl.training.options import TrainerOptions
from pearl_rl.training.results import RankTimes, UpdateResult

_WEIGHT: Final = 0.3
"""Of the newest update in the moving average of costs."""


class FormedRanks(Protocol):
    """What the choice needs of a trainer; see `LocalTrainer`."""

    options: TrainerOptions
    timed: bool
    forming_s: float

    @property
    def ranks(self) -> int:
        """All ranks."""
        ...

    async def form_anew(self, *, reference_rank: bool) -> None:
        """Start all ranks anew, decoupled or colocated."""
        ...

    async def update(self, batch: TrainBatch) -> UpdateResult:
        """Train on `batch`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateModeRecord:
    """A decision, with what the update then took."""

    version: int
    """Weight version that the update made."""
    decision: UpdateMode
    measured_s: float
    """Of the slowest rank, publication apart, seconds."""
    costs: ModeCosts
    """By which it was decided; of a mode that never ran there are none."""


class AutoRefActor:
    """Makes a trainer's updates, each in the mode that is worth it; `record` is told of every one."""

    def __init__(self, trainer: FormedRanks, record: Callable[[UpdateModeRecord], None]) -> None:
        trainer.timed = True
        self._trainer = trainer
        self._record = record
        self._costs: dict[RefActorMode, PassCosts] = {}
        self._warm = False
        """Whether the ranks made an update since they were formed: the first is slower than any other."""
        self._behind_s = 0.0

    @property
    def mode(self) -> RefActorMode:
        """How the ranks are formed now: that is the trainer's to say, which may have lost them on the way."""
        return RefActorMode.DECOUPLED if self._trainer.options.reference_rank else RefActorMode.COLOCATED

    async def update(self, batch: TrainBatch) -> UpdateResult:
        """See `LocalTrainer.update`; the ranks are formed anew before where that pays."""
        trainer = self._trainer
        costs = dict(self._costs)
        decision = self._decide(batch)
        if decision.changes:
            await trainer.form_anew(reference_rank=decision.mode is RefActorMode.DECOUPLED)
            self._warm = False
        # Where it fails, it is made again by new ranks.
        warm, self._warm = self._warm, False
        result = await trainer.update(batch)
        self._warm = True
        self._behind_s = 0.0 if decision.changes else decision.behind_s
        if warm:
            found, known = measured_costs(batch, trainer.options, result.times, costs), costs.get(self.mode)
            self._costs[self.mode] = found if known is None else known.towards(found, _WEIGHT)
        measured_s = max(times.update_s for times in result.times)
        self._record(UpdateModeRecord(version=result.version, decision=decision, measured_s=measured_s, costs=costs))
        return result

    def _decide(self, batch: TrainBatch) -> UpdateMode:
        trainer = self._trainer
        return decide_update_mode(
            self.mode,
            self._behind_s,
            colocated=load_of(batch, trainer.options, trainer.ranks),
            decoupled=load_of(batch, trainer.options, trainer.ranks - 1) if trainer.ranks > 1 else None,
            costs=self._costs,
            ranks=trainer.ranks,
            reform_s=trainer.forming_s,
        )


def load_of(batch: TrainBatch, options: TrainerOptions, actors: int) -> UpdateLoad:
    """The update of `batch` by so many actors."""
    plan = _plan(batch, options, actors)
    rounds = max(1, round(sum(len(step.ranks[0]) for step in plan) / len(plan)))
    return UpdateLoad(
        optimizer_steps=options.epochs * len(plan),
        ready_s=(0.0,) * (rounds * actors),
        micro_batch_tokens=_in_step(batch, plan) / (rounds * len(plan)),
    )


def measured_costs(
    batch: TrainBatch, options: TrainerOptions, times: Sequence[RankTimes], known: ModeCosts
) -> PassCosts:
    """What passes cost in an update of `batch`, by what each rank took. Decoupled nothing is swapped: as `known`."""
    actors = times[: len(times) - options.reference_rank]
    plan = _plan(batch, options, len(actors))
    tokens = options.epochs * _in_step(batch, plan)
    actor_s = fmean(rank.update_s - rank.asking_s for rank in actors) / tokens
    if options.reference_rank:
        scored = options.epochs * sum(_padded(batch, micro) for step in plan for share in step.ranks for micro in share)
        colocated = known.get(RefActorMode.COLOCATED)
        swap_s = 0.0 if colocated is None else colocated.swap_s
        return PassCosts(reference_s=times[-1].scoring_s / scored, actor_s=actor_s, swap_s=swap_s)
    swapping_s = fmean(rank.asking_s - rank.scoring_s for rank in actors)
    return PassCosts(
        reference_s=fmean(rank.scoring_s for rank in actors) / tokens,
        actor_s=actor_s,
        # Each optimizer step swaps to the reference and back.
        swap_s=swapping_s / (2 * options.epochs * len(plan)),
    )


def _plan(batch: TrainBatch, options: TrainerOptions, actors: int) -> tuple[MiniBatch, ...]:
    return plan_update(batch, actors, options.minibatches, options.micro_batch_tokens, options.loss.aggregation)


def _in_step(batch: TrainBatch, plan: Sequence[MiniBatch]) -> float:
    """Padded tokens that a rank passes: collectives let each wait for the one with the largest micro-batch."""
    sizes = ([_padded(batch, micro) for micro in side] for step in plan for side in zip(*step.ranks, strict=True))
    return float(sum(max(side) for side in sizes))


def _padded(batch: TrainBatch, micro: MicroBatch) -> int:
    """Tokens of a micro-batch with its padding; see `MicroTensors`."""
    return max(1, len(micro.rows)) * max([2, *(len(batch.sequences[row].tokens) for row in micro.rows)])
