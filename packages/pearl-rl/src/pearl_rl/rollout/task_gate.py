"""Task batching in front of the router: a turn waits here until its task may keep its KV on a worker.

Beside it, the table is followed: a worker that serves has a token budget, one that does not has none, and its tasks go
on elsewhere at their next turn. The router still chooses the worker of each request, by the prefix first.
"""

import asyncio
from dataclasses import dataclass

from pearl_planner.task_batching import PriorityWeights
from pearl_rl.rollout.calls import FailureCause, GenerationFailedError, ModelCall, TurnResult
from pearl_rl.rollout.lifecycle import LifecycleTrace
from pearl_rl.rollout.router import Router
from pearl_rl.rollout.task_batcher import TaskBatcher, TaskBatchingSettings
from pearl_state.roles import Role
from pearl_state.table import WorkerTable
from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.worker import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGateLimits:
    """Sizes of the gate."""

    kv_tokens: int
    """KV tokens of one worker."""
    budget_fraction: float = 0.9
    """Part of them that active tasks may take; the rest absorbs what ended tasks leave in the cache."""
    growth_tokens: int = 256
    """Room for the response of a turn that begins, at most what the call may generate."""
    wait_s: float = 3600.0
    """How long a turn may wait for room."""


class TaskGate:
    """One per run; everything happens in the run's event loop."""

    def __init__(
        self,
        router: Router,
        limits: TaskGateLimits,
        settings: TaskBatchingSettings,
        *,
        lifecycle: LifecycleTrace | None = None,
    ) -> None:
        """`lifecycle` is told of turns that join the ready queue here."""
        self._lifecycle = lifecycle
        self._router = router
        self._limits = limits
        self._groups: dict[TrajectoryId, tuple[GroupId, bool]] = {}
        self._added: set[TrajectoryId] = set()
        self._granted: dict[TrajectoryId, asyncio.Future[WorkerId]] = {}
        self.batcher = TaskBatcher(settings, on_run=self._run, on_unfit=self._refuse)
        """Which tasks have room now, and what happened so far."""

    # ---- the table --------------------------------------------------------------------------------------------------

    def apply(self, table: WorkerTable) -> None:
        """Hand the table to the router; who holds a context (decode and colocated workers) has a budget."""
        self._router.apply(table)
        tokens = int(self._limits.kv_tokens * self._limits.budget_fraction)
        self.batcher.set_budgets(dict.fromkeys(table.active(Role.COLOCATED, Role.DECODE), tokens))

    def loads(self) -> dict[WorkerId, float]:
        """See `Router.loads`."""
        return self._router.loads()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def begin(self, task: TrajectoryId, group: GroupId, *, evaluation: bool = False) -> None:
        """A task is about to ask for its first turn."""
        self._groups[task] = (group, evaluation)

    def end(self, task: TrajectoryId, *, finished: bool) -> None:
        """A task is over, or was given up."""
        self._groups.pop(task, None)
        self._added.discard(task)
        waiter = self._granted.pop(task, None)
        if waiter is not None:
            waiter.cancel()
        self.batcher.end(task, finished=finished)

    async def generate(self, call: ModelCall) -> TurnResult:
        """As `Router.generate`, once the task has room. Raises `GenerationFailedError` where it gets none in time."""
        task = call.trajectory
        if task not in self._groups:
            return await self._router.generate(call)
        if self._lifecycle is not None:
            self._lifecycle.ready(task, call.turn, len(call.prompt))
        granted = self._granted[task] = asyncio.get_running_loop().create_future()
        if task in self._added:
            self.batcher.turn(task, len(call.prompt), min(call.max_new_tokens, self._limits.growth_tokens))
        else:
            group, evaluation = self._groups[task]
            self._added.add(task)
            self.batcher.add(task, group, evaluation=evaluation)
        try:
            async with asyncio.timeout(self._limits.wait_s) as limit:
                await granted
        except TimeoutError as late:
            if not limit.expired():
                raise
            usage = ", ".join(f"worker {w}: {tokens}" for w, tokens in self.batcher.usage_tokens.items())
            raise GenerationFailedError(
                FailureCause.NO_WORKER,
                f"{task} turn {call.turn}: no room for {len(call.prompt)} tokens within {self._limits.wait_s:g} s "
                f"(tokens in use on {usage or 'nobody'}, {self.batcher.waiting} tasks wait)",
            ) from late
        finally:
            self._granted.pop(task, None)
        result = await self._router.generate(call)
        self.batcher.turn_over(task, len(call.prompt) + len(result.tokens))
        return result

    def _run(self, task: TrajectoryId, worker: WorkerId) -> None:
        granted = self._granted.get(task)
        if granted is not None and not granted.done():
            granted.set_result(worker)

    def _refuse(self, task: TrajectoryId, tokens: int) -> None:
        granted = self._granted.get(task)
        if granted is not None and not granted.done():
            limits = self._limits
            granted.set_exception(
                GenerationFailedError(
                    FailureCause.NO_WORKER,
                    f"{task} needs {tokens} tokens of KV, more than the {limits.budget_fraction:.0%} of "
                    f"{limits.kv_tokens} that trajectories may hold on a worker; give workers more KV, or bound the "
                    "context",
                )
            )


def batching_gate(
    router: Router,
    limits: TaskGateLimits,
    *,
    context_tokens: int,
    group_size: int,
    lifecycle: LifecycleTrace | None = None,
) -> TaskGate:
    """Continuous task batching in front of `router`, for trajectories of up to `context_tokens` in groups of
    `group_size`. A group's first task is taken to need all of them.
    """
    batching = TaskBatchingSettings(
        probe_tokens=context_tokens,
        group_size=group_size,
        weights=PriorityWeights(context_scale_tokens=context_tokens),
    )
    return TaskGate(router, limits, batching, lifecycle=lifecycle)
