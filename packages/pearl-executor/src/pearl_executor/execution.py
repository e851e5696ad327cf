"""The executor of all effects that concern workers and training: each effect in, its answer out as an event."""

import asyncio
from collections.abc import Callable

from pearl_executor.calls import Action, BoundedCalls, CallError, OnAction
from pearl_executor.limits import Limits
from pearl_executor.ports import TrainingPort, WeightSource, WorkerPort
from pearl_executor.rebuilder import ClusterRebuilder
from pearl_executor.switching import RoleSwitcher, isolated
from pearl_executor.toggle import ToggleManager
from pearl_executor.weight_sync import SupersededError, WeightSync
from pearl_executor.workers import BoundedWorkers
from pearl_state.effects import (
    ApplyStage,
    CancelGroup,
    CleanWorkers,
    Effect,
    GroupKind,
    PrepareGroup,
    ReleaseTraining,
    ResumeTraining,
    SyncWeights,
)
from pearl_state.events import (
    Event,
    GroupFailed,
    StageApplied,
    WeightsReported,
    WorkerFailed,
    WorkersCleaned,
)
from pearl_state.plan import PlanId
from pearl_state.roles import Zone
from pearl_state.worker import Worker

Post = Callable[[Event], None]


class ElasticExecutor:
    """Carries effects out through the ports and posts what came of them.

    Workers on dedicated GPUs are the Cluster Rebuilder's, those on training GPUs the Toggle Manager's; role changes
    and the admission check are shared. An expected failure is part of the answer and concerns one worker only (a
    group that is prepared fails as a whole). Times are the event loop's.
    """

    def __init__(
        self,
        workers: WorkerPort,
        training: TrainingPort | None,
        weights: WeightSource,
        limits: Limits | None = None,
        on_action: OnAction = lambda _action: None,
        *,
        retained_fraction: float = 0.05,
    ) -> None:
        """`on_action` is told of each finished port call.

        `retained_fraction` is the part of its device memory that a released process may keep.
        """
        limits = Limits() if limits is None else limits
        calls = BoundedCalls(on_action, limits.cancel_s)
        self._workers = BoundedWorkers(workers, calls, limits, retained_fraction=retained_fraction)
        self._weights = WeightSync(self._workers, weights)
        self._switcher = RoleSwitcher(self._workers, self._weights)
        self._rebuilder = ClusterRebuilder(self._workers, self._weights)
        self._toggle = ToggleManager(self._workers, self._weights, training, calls)
        self._groups: dict[PlanId, asyncio.Task[None]] = {}

    def close(self) -> None:
        """The run ends, and its runtime with all processes: effects under way still end, but do not wait for kills
        that are never confirmed.
        """
        self._workers.closing = True

    async def run(self, effect: Effect, post: Post) -> None:
        """Carry `effect` out and post its answers. Effects that name no worker are for others and do nothing here.

        Cancelling a preparation gives it up: what it began is cleaned and the answer posted before this ends as
        cancelled; running `CancelGroup` does the same to the plan it names. Cancelling a cleaning stops its
        repetitions. Any other effect is bounded and must not stop half-way: it is finished and answered first.
        """
        if isinstance(effect, CancelGroup):
            if (group := self._groups.get(effect.plan_id)) is not None:
                group.cancel()
            return
        work = asyncio.ensure_future(self._answer(effect, post))
        if isinstance(effect, PrepareGroup):
            self._groups[effect.plan_id] = work
        cancelled = await self._finish(work, give_up=isinstance(effect, PrepareGroup | CleanWorkers))
        if isinstance(effect, PrepareGroup):
            del self._groups[effect.plan_id]
            if work.cancelled():
                # Given up before its first step: nothing was begun.
                post(GroupFailed(now_s=_now_s(), plan_id=effect.plan_id))
        if not work.cancelled():
            work.result()
        if cancelled:
            raise asyncio.CancelledError

    async def _finish(self, work: "asyncio.Task[None]", *, give_up: bool) -> bool:
        """Wait for `work` whatever happens to the caller; tells whether the caller was cancelled."""
        cancelled = False
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                if give_up and not cancelled:
                    work.cancel()
                cancelled = True
        return cancelled

    async def _answer(self, effect: Effect, post: Post) -> None:
        match effect:
            case PrepareGroup(kind=GroupKind.EXPANSION):
                post(await self._rebuilder.expand(effect))
            case PrepareGroup(kind=GroupKind.BORROW):
                post(await self._toggle.borrow(effect))
            case ApplyStage():
                post(await self._apply(effect))
            case SyncWeights():
                await asyncio.gather(*(self._sync(worker, effect.version, post) for worker in effect.workers))
            case CleanWorkers():
                await asyncio.gather(*(self._clean(worker, post) for worker in effect.workers))
            case ReleaseTraining():
                post(await self._toggle.release_training(effect))
            case ResumeTraining():
                post(await self._toggle.resume_training(effect))
            case _:
                return

    async def _apply(self, effect: ApplyStage) -> StageApplied:
        """Those who leave and those who change do so at the same time; nobody waits for another's failure."""
        began_s = _now_s()
        leaving = {w.id: self._leave(w, effect.deadline_s) for w in effect.leave}
        (left, not_left), (reported, not_admitted) = await asyncio.gather(
            isolated(leaving), self._switcher.change(effect.switch, effect.admit, effect.target_version)
        )
        now_s = _now_s()
        return StageApplied(
            now_s=now_s,
            plan_id=effect.plan_id,
            stage=effect.stage,
            reported=reported,
            left=frozenset(left),
            failed={**not_admitted, **not_left},
            duration_s=now_s - began_s,
        )

    async def _leave(self, worker: Worker, deadline_s: float | None) -> None:
        leave = self._toggle.leave if worker.zone is Zone.OVERLAP else self._rebuilder.leave
        await leave(worker, deadline_s)

    async def _sync(self, worker: Worker, version: int, post: Post) -> None:
        """Bring a serving worker to `version`. One that leaves meanwhile is reported by the effect that removes it."""
        try:
            reported = worker.weight_version
            if reported is None or reported < version:
                reported = await self._weights.bring(worker, version, self._workers.limits.sync_s)
        except SupersededError:
            return
        except CallError as error:
            post(WorkerFailed(now_s=_now_s(), worker=worker.id, incarnation=worker.incarnation, cause=str(error)))
        else:
            post(WeightsReported(now_s=_now_s(), worker=worker.id, incarnation=worker.incarnation, version=reported))

    async def _clean(self, worker: Worker, post: Post) -> None:
        """Kill until it is certain: before that, nobody else may be told that the GPUs are free."""
        self._weights.give_up(worker)
        await self._workers.kill_until_confirmed(worker)
        post(WorkersCleaned(now_s=_now_s(), workers={worker.id: worker.incarnation}))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


__all__ = ["Action", "ElasticExecutor", "Post"]
