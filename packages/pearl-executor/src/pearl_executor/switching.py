"""Role changes and the admission check: what both executors share.

A role changes in place on a drained engine; its weights stay. Admission is the last step of everything: a worker is
reported only with the version that its process says it holds, at least the target.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from pearl_executor.calls import CallError
from pearl_executor.weight_sync import WeightSync
from pearl_executor.workers import BoundedWorkers
from pearl_state.roles import Role
from pearl_state.worker import Worker, WorkerId

T = TypeVar("T")


class RoleSwitcher:
    """Changes roles of drained workers and checks the versions of those who shall serve."""

    def __init__(self, workers: BoundedWorkers, weights: WeightSync) -> None:
        self._workers = workers
        self._weights = weights

    async def change(
        self, switch: Mapping[WorkerId, Role], admit: Sequence[Worker], target_version: int
    ) -> tuple[dict[WorkerId, int], dict[WorkerId, str]]:
        """Change the roles of `switch`, whose rows in `admit` carry the new role; then check versions of all `admit`.

        Returns what each may be admitted with, and the causes of those that failed; one failure touches nobody else.
        All roles are in place before peers are told, since a peer may be switching too.
        """
        strangers = switch.keys() - {w.id for w in admit}
        failed = {
            id_: f"worker {id_}: is to change its role, but is not among those who shall serve" for id_ in strangers
        }
        _, causes = await isolated({w.id: self._switch(w) for w in admit if w.id in switch})
        failed.update(causes)
        checks = {w.id: self._check(w, w.id in switch, target_version) for w in admit if w.id not in failed}
        reported, causes = await isolated(checks)
        failed.update(causes)
        return reported, failed

    async def _switch(self, worker: Worker) -> None:
        await self._workers.drain(worker, self._workers.limits.idle_s)
        await self._weights.settle(worker)
        await self._workers.switch(worker)

    async def _check(self, worker: Worker, switched: bool, target_version: int) -> int:
        if switched:
            await self._workers.refresh_peers(worker)
        if worker.weight_version is not None and worker.weight_version >= target_version:
            return worker.weight_version
        return await self._weights.bring(worker, target_version, self._workers.limits.sync_s)


async def isolated(work: Mapping[WorkerId, Coroutine[Any, Any, T]]) -> tuple[dict[WorkerId, T], dict[WorkerId, str]]:
    """Run everybody's work at once, each to its end: the results, and the causes of those that raised `CallError`."""
    outcomes = await asyncio.gather(*work.values(), return_exceptions=True)
    done: dict[WorkerId, T] = {}
    failed: dict[WorkerId, str] = {}
    for id_, outcome in zip(work, outcomes, strict=True):
        if isinstance(outcome, CallError):
            failed[id_] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            done[id_] = outcome
    return done, failed
