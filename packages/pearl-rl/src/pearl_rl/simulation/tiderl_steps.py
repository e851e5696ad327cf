"""A whole asynchronous training loop on a fixed number of GPUs: rollout and trainer side by side, as TideRL runs it.

Rollout is that of `tiderl_rollout`, request by request. The trainer consumes micro-batches as groups become ready, by
the cost models of `pearl_planner.ref_actor`; the split of the GPUs is fixed or follows `pearl_planner.readiness`.
Counted are the two waits of TideRL section 2.2: rollout's, while the staleness bound throttles it and workers have
nothing to do (RWT), and the trainer's, while no micro-batch is ready (TWT).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from pearl_planner.readiness import (
    BatchInterval,
    BufferReadiness,
    RankSplit,
    ReadinessSettings,
    ScalingDecision,
    decide_scaling,
)
from pearl_planner.ref_actor import MicroBatchCosts, RefActorMode, TrainerShape, backlog_s, break_even_ras
from pearl_planner.split_waits import WaitMemory
from pearl_rl.simulation.tiderl_platform import TidePlatform, Workload
from pearl_rl.simulation.tiderl_rollout import Batching, SimulatedTask, TaskRollout
from pearl_rl.simulation.workload import Script
from pearl_state.trajectory import GroupId, TrajectoryId

_SMOOTHING = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """One training loop."""

    gpus: int = 8
    rollout: int = 2
    """GPUs that roll out at the beginning, or for good."""
    scaling: bool = False
    """Whether the split follows readiness (ERS)."""
    least_actors: int = 3
    """Ranks that the trainer keeps in any case: what its memory needs (`TidePlatform.least_actors`)."""
    pipelining: bool = True
    """Whether the trainer aggregates or decouples (RA²P); else it swaps at each micro-batch."""
    batching: Batching
    groups: int = 16
    """Groups of a full batch (B_ideal)."""
    group_size: int = 8
    staleness: int = 1
    steps: int = 100
    evaluate_every: int = 20
    """Steps between evaluations; the first is before the first step."""
    evaluation_tasks: int = 200
    final_turns: float = 1.0
    """Turns of the last step's trajectories over those of the first one's; in between, linear."""
    sync_s: float = 1.0
    """Broadcasting weights after an update; assumed."""
    seed: int = 0

    @property
    def batch(self) -> int:
        """B_ideal in trajectories."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOutcome:
    """What a loop came to."""

    elapsed_s: float
    rollout_wait_s: float
    """RWT, mean over the workers of each moment."""
    trainer_wait_s: float
    """TWT."""
    consumed_tokens: int
    discarded: int
    """Trajectories that were too old when the trainer came to them."""
    staleness: float
    """Mean over consumed trajectories."""
    rollout_ranks: float
    """Mean over steps."""
    decoupled_steps: int

    @property
    def wait_s(self) -> float:
        """RWT + TWT."""
        return self.rollout_wait_s + self.trainer_wait_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens that reached the trainer, per second: TideRL's goodput."""
        return self.consumed_tokens / self.elapsed_s


@dataclass(slots=True)
class _Group:
    version: int
    tasks: list[SimulatedTask] = field(default_factory=list)
    ready_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(task.tokens for task in self.tasks)


class TrainingLoop:
    """One loop, run once."""

    def __init__(self, settings: LoopSettings, workload: Workload) -> None:
        self._settings = settings
        self._workload = workload
        self._testbed = TidePlatform.of(workload.model)
        self._unit = self._testbed.micro_batch(8192, offload=True)
        self._rollout = TaskRollout(self._testbed.worker, settings.batching, settings.rollout, workload.window)
        self._split = RankSplit(rollout=settings.rollout, actor=settings.gpus - settings.rollout)
        self._ready: list[_Group] = []
        self._open: dict[int, _Group] = {}
        self._version = self._opened = self._evaluating = 0
        self._consumed = self._consumed_groups = self._step_groups = 0
        self._fetch = settings.groups
        self._paced = 0
        self._lent: RankSplit | None = None
        self._busy = self._done = False
        self._idle_since: float | None = 0.0
        self._step_began_s = self._counted_idle_s = 0.0
        self._throttled = False
        self._waits = WaitMemory()
        self._waited_before_s = 0.0
        self._tprm_s = self._step_s = 0.0
        self._arrived: list[float] = []
        self._rwt = self._twt = 0.0
        self._discarded = self._decoupled = 0
        self._ages: list[int] = []
        self._ranks: list[int] = []
        self._number = 0
        self._readiness = ReadinessSettings(
            batch=BatchInterval(minimum=settings.batch // 2, ideal=settings.batch),
            min_actor_ranks=settings.least_actors,
            head_of_line_factor=1.0,
            hidden_s=settings.sync_s,
        )

    def run(self) -> LoopOutcome:
        """Make all steps."""
        self._boundary()
        self._rollout.run(lambda: self._done)
        if not self._done:
            raise RuntimeError(f"training stands still at step {self._version + 1}: nothing is under way any more")
        return LoopOutcome(
            elapsed_s=self._rollout.now_s,
            rollout_wait_s=self._rwt,
            trainer_wait_s=self._twt,
            consumed_tokens=self._consumed,
            discarded=self._discarded,
            staleness=fmean(self._ages),
            rollout_ranks=fmean(self._ranks),
            decoupled_steps=self._decoupled,
        )

    # ---- rollout ----------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Time of rollout workers without a request, while the bound is what keeps new tasks from them."""
        idle_s = self._rollout.idle_s
        if self._throttled:
            self._rwt += idle_s - self._counted_idle_s
        self._counted_idle_s = idle_s
        self._throttled = self._room() < 1 and not self._evaluating

    def _room(self) -> int:
        """Groups that may be opened: (η + 1) batches beyond what earlier versions consumed."""
        settings = self._settings
        return self._consumed_groups + (settings.staleness + 1) * settings.groups - self._opened

    def _inject(self) -> None:
        self._count()
        for _ in range(max(0, self._room())):
            group = _Group(self._version)
            self._open[id(group)] = group
            self._opened += 1
            self._add(self._settings.group_size, f"g{self._opened:06d}", lambda t, s, g=group: self._ended(g, t, s))

    def _add(self, count: int, group: str, on_end: Callable[..., None], *, evaluation: bool = False) -> None:
        tasks = []
        for script in self._scripts(count):
            self._number += 1
            id_ = TrajectoryId(f"t{self._number:08d}")
            tasks.append(SimulatedTask(id_, GroupId(group), script, on_end, evaluation=evaluation, kind=group))
        self._rollout.add(tasks)

    def _scripts(self, count: int) -> list[Script]:
        """The next scripts; trajectories change as training goes on."""
        settings = self._settings
        part = min(1.0, self._version / max(1, settings.steps))
        turns = self._workload.options.turns_scale * (1.0 + part * (settings.final_turns - 1.0))
        workload = replace(self._workload, options=replace(self._workload.options, turns_scale=turns))
        return workload.scripts(count, settings.group_size, settings.seed, self._number)

    def _ended(self, group: _Group, task: SimulatedTask, now_s: float) -> None:
        self._count()
        group.tasks.append(task)
        if len(group.tasks) == self._settings.group_size:
            group.ready_s = now_s
            del self._open[id(group)]
            self._arrived.append(now_s)
            self._ready.append(group)
            self._consume()

    def _evaluate(self) -> None:
        """Evaluation tasks run beside the next step; its weights are broadcast only when they are over."""
        settings = self._settings
        self._evaluating = settings.evaluation_tasks
        for number in range(0, settings.evaluation_tasks, settings.group_size):
            count = min(settings.group_size, settings.evaluation_tasks - number)
            self._add(count, f"e{self._version:04d}.{number:05d}", self._evaluated, evaluation=True)

    def _evaluated(self, _task: SimulatedTask, _now_s: float) -> None:
        self._count()
        self._evaluating -= 1
        if not self._evaluating:
            self._consume()

    # ---- trainer ----------------------------------------------------------------------------------------------------

    def _consume(self) -> None:
        """Take what is ready, or end the step, or wait."""
        if self._busy or self._done:
            return
        self._drop_stale()
        settings = self._settings
        # What the next version would make too old is taken beyond the batch.
        oldest = self._version - settings.staleness
        left = max(self._fetch - self._step_groups, sum(group.version <= oldest for group in self._ready))
        if self._ready and left > 0:
            most = left if settings.pipelining and self._split.mode is RefActorMode.COLOCATED else 1
            taken = sorted(self._ready, key=lambda group: group.version)[:most]
            for group in taken:
                self._ready.remove(group)
            self._work(taken)
            return
        due = any(group.version <= oldest for group in self._open.values())
        if self._step_groups >= self._fetch and not due and not self._evaluating:
            self._busy = True
            self._waited()
            self._rollout.at(self._rollout.now_s + settings.sync_s, self._updated)
        elif self._idle_since is None:
            self._idle_since = self._rollout.now_s

    def _waited(self) -> None:
        if self._idle_since is not None:
            self._twt += self._rollout.now_s - self._idle_since
            self._idle_since = None

    def _drop_stale(self) -> None:
        oldest = self._version - self._settings.staleness
        for group in [group for group in self._ready if group.version < oldest]:
            self._ready.remove(group)
            self._discarded += len(group.tasks)

    def _work(self, taken: list[_Group]) -> None:
        self._busy = True
        self._waited()
        for group in taken:
            self._consumed += group.tokens
            self._ages += [self._version - group.version] * len(group.tasks)
        self._step_groups += len(taken)
        self._rollout.at(self._rollout.now_s + self._train_s(sum(group.tokens for group in taken)), self._worked)

    def _train_s(self, tokens: int) -> float:
        """Reference, forward and backward over `tokens` tokens on the trainer's ranks."""
        references = self._split.reference if self._settings.pipelining else 0
        actors = self._split.actor + self._split.reference - references
        return backlog_s(tokens / 8192, self._unit, actors=actors, references=references)

    def _worked(self) -> None:
        self._busy = False
        self._consume()

    def _updated(self) -> None:
        self._count()
        self._busy = False
        self._version += 1
        self._consumed_groups += self._step_groups
        self._rollout.new_weights(self._settings.sync_s)
        if self._version >= self._settings.steps:
            self._done = True
            return
        self._boundary()

    # ---- the post-update boundary -----------------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Before the next step: evaluation, scaling, new groups."""
        settings, now_s = self._settings, self._rollout.now_s
        evaluate = settings.evaluation_tasks > 0 and self._version % settings.evaluate_every == 0
        self._smooth(now_s)
        if settings.scaling:
            self._scale(evaluate)
        elif settings.pipelining:
            self._split = self._fixed_split()
        self._ranks.append(self._split.rollout)
        self._decoupled += self._split.mode is RefActorMode.DECOUPLED
        self._step_groups, self._step_began_s, self._arrived = 0, now_s, []
        if evaluate:
            self._evaluate()
        self._inject()
        self._idle_since = now_s
        self._consume()

    def _smooth(self, now_s: float) -> None:
        # The δ of appendix A: the wait for the first one counts, else a burst after a long silence looks like plenty.
        gaps = [b - a for a, b in pairwise([self._step_began_s, *self._arrived])]
        if gaps:
            self._tprm_s += _SMOOTHING * (fmean(gaps) - self._tprm_s) if self._tprm_s else fmean(gaps)
        if self._version:
            took_s = now_s - self._step_began_s
            self._step_s += _SMOOTHING * (took_s - self._step_s) if self._step_s else took_s
            waited_s = self._rwt + self._twt
            if self._lent is None:
                self._waits = self._waits.with_step(self._split.rollout, waited_s - self._waited_before_s, took_s)
            self._waited_before_s = waited_s

    def _group_costs(self) -> MicroBatchCosts:
        """Costs of one group as a micro-batch of one rank."""
        part, unit = (self._consumed / max(1, self._consumed_groups) or 8192.0) / 8192, self._unit
        return MicroBatchCosts(
            ref_forward_s=unit.ref_forward_s * part,
            actor_forward_s=unit.actor_forward_s * part,
            actor_backward_s=unit.actor_backward_s * part,
            swap_s=unit.swap_s,
        )

    def _pace_s(self) -> float:
        """What the trainer takes for one group, swaps apart."""
        costs, split = self._group_costs(), self._split
        return (costs.ref_forward_s + costs.actor_s) / (split.actor + split.reference)

    def _break_even(self, ranks: int) -> int | None:
        if ranks < 2:
            return None
        return break_even_ras(self._settings.groups, self._tprm_s, self._group_costs(), TrainerShape(ranks=ranks))

    def _fixed_split(self) -> RankSplit:
        """With a fixed number of trainer ranks, one of them may still be the reference's (RA²P alone)."""
        ranks = self._settings.gpus - self._settings.rollout
        least = self._break_even(ranks)
        decoupled = least is not None and len(self._ready) >= least
        return RankSplit(rollout=self._settings.rollout, actor=ranks - decoupled, reference=int(decoupled))

    def _scale(self, evaluate: bool) -> None:
        settings = self._settings
        oldest = min((group.ready_s for group in self._ready), default=self._rollout.now_s)
        buffer = BufferReadiness(
            volume=(self._step_groups + len(self._ready)) * settings.group_size,
            ready=len(self._ready) * settings.group_size,
            ras=len(self._ready),
            tprm_s=self._tprm_s,
            head_of_line_s=self._rollout.now_s - oldest,
            step_s=self._step_s,
            micro_batch_s=self._pace_s(),
            micro_batches=settings.groups,
            evaluation_load=settings.evaluation_tasks / settings.group_size if evaluate else 0.0,
            # Decoupled, the trainer has the reference's rank on top.
            break_even_ras=self._break_even(self._split.actor + max(1, self._split.reference)),
            cold_start=self._version == 0,
            evaluating=evaluate,
        )
        made: ScalingDecision = decide_scaling(
            buffer,
            self._split,
            self._readiness,
            paced_steps=self._paced,
            lent=self._lent,
            training=self._group_costs(),
            waits=self._waits,
        )
        self._paced, self._lent = made.paced_steps, made.lent
        self._fetch = made.fetch // settings.group_size
        if made.split != self._split:
            self._split = made.split
            self._rollout.set_workers(made.split.rollout)


def run_loop(settings: LoopSettings, workload: Workload) -> LoopOutcome:
    """Run one training loop to its end."""
    return TrainingLoop(settings, workload).run()
