"""TideRL's results beside ours: task batching, ref-actor pipelining, readiness scaling, and all of them together."""

from collections.abc import Iterable
from dataclasses import dataclass

from pearl_planner.ref_actor import TrainerShape, colocated_pipeline_s, decoupled_pipeline_s
from pearl_planner.task_batching import PriorityWeights
from pearl_rl.rollout.task_batcher import TaskBatchingSettings
from pearl_rl.simulation.experiments.bench import Bench
from pearl_rl.simulation.experiments.targets import TargetRow, gain
from pearl_rl.simulation.tiderl_platform import WEBSHOP, Testbed
from pearl_rl.simulation.tiderl_rollout import RequestBatching, RolloutSummary, TokenBatching, roll_out

_GROUP = 8
_TASKS = 1312
_MICRO_BATCHES, _MICRO_TOKENS, _RANKS = 8, 8192, 4


@dataclass(frozen=True, slots=True)
class TaskBatchingJob:
    """One step of WebShop tasks on one H100; `concurrency` 0: task batching."""

    tasks: int
    concurrency: int

    def run(self) -> RolloutSummary:
        """See `Job`."""
        batching = RequestBatching(concurrency=self.concurrency) if self.concurrency else token_batching()
        return roll_out(WEBSHOP.scripts(self.tasks, _GROUP), _GROUP, Testbed.of(WEBSHOP.model).worker, batching)


def token_batching(context_tokens: int = 8192) -> TokenBatching:
    """Task batching as all experiments use it."""
    weights = PriorityWeights(context_scale_tokens=context_tokens)
    return TokenBatching(settings=TaskBatchingSettings(probe_tokens=800, group_size=_GROUP, weights=weights))


def rows(bench: Bench, *, quick: bool) -> Iterable[TargetRow]:
    """Run what is needed, and say what came out."""
    tasks = _TASKS // 8 if quick else _TASKS
    bench.prepare([TaskBatchingJob(tasks, concurrency) for concurrency in (0, 512, 1024)])
    yield from _task_batching(bench, tasks)
    yield from _ref_actor()


def _task_batching(bench: Bench, tasks: int) -> Iterable[TargetRow]:
    """Section 6.5, Figures 12 and 13: at least the paper's gain over both fixed concurrencies."""
    ours = bench.result(TaskBatchingJob(tasks, 0))
    for concurrency in (1024, 512):
        base = bench.result(TaskBatchingJob(tasks, concurrency))

        def row(name: str, paper: float, value: float, over: int = concurrency) -> TargetRow:
            return TargetRow(
                id="tiderl",
                name=f"CTB: {name} over {over} at a time",
                use="predict",
                paper=paper,
                ours=value,
                unit="ratio",
                at_least=True,
            )

        yield row("cache-hit rate", 1.58, ours.hit_rate / base.hit_rate)
        yield row("generated tokens per second", 1.15, ours.tokens_per_s / base.tokens_per_s)
        yield row("step time saved, %", 15.6, -gain(ours.makespan_s, base.makespan_s))


def _ref_actor() -> Iterable[TargetRow]:
    """Section 6.5, Figure 14: eight ready micro-batches on four H100s, against swapping at each micro-batch."""
    costs = Testbed.of(WEBSHOP.model).micro_batch(_MICRO_TOKENS, offload=True)
    ready = (0.0,) * _MICRO_BATCHES
    vanilla = colocated_pipeline_s(ready, costs, TrainerShape(ranks=_RANKS, aggregate=1))
    together = colocated_pipeline_s(ready, costs, TrainerShape(ranks=_RANKS))
    apart = decoupled_pipeline_s(ready, costs, TrainerShape(ranks=_RANKS))
    yield TargetRow(
        id="tiderl",
        name="RA2P: step time against streaming with offload, %",
        use="predict",
        paper=-44.3,
        ours=gain(min(together, apart), vanilla),
        unit="points",
    )
