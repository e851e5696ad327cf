"""Bringing workers to the newest weights: one load at a time on a worker, repeated where a newer one came meanwhile."""

import asyncio

from pearl_executor.calls import CallError, FailureKind
from pearl_executor.ports import WeightSnapshot, WeightSource
from pearl_executor.workers import BoundedWorkers
from pearl_state.worker import Worker, WorkerId

RELOADS = 3
"""How often a load is repeated because a newer version came or the snapshot was withdrawn meanwhile."""


class SupersededError(CallError):
    """A load was given up because its worker leaves: nobody needs its outcome."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(f"worker {worker.id}: load_weights was given up, the worker leaves", FailureKind.REFUSED)


class WeightSync:
    """Loads snapshots into workers (lazy weight propagation of PEARL section 4.5).

    Loads of one worker never overlap: who asks while one is under way waits for it and takes its result if that is
    new enough. So a fast publisher cannot pile loads up.
    """

    def __init__(self, workers: BoundedWorkers, source: WeightSource) -> None:
        self._workers = workers
        self._source = source
        self._loads: dict[tuple[WorkerId, int], asyncio.Task[int]] = {}
        self._in_doubt: dict[WorkerId, tuple[int, CallError]] = {}
        """Slot → the incarnation whose last load never answered, and how that was found: it may still be loading."""

    def newest_version(self) -> int:
        """The newest published version. Raises `CallError` where the source has none."""
        return self._newest().version

    async def bring(self, worker: Worker, version: int, limit_s: float) -> int:
        """Load the newest snapshot, at least `version`; return what the worker reports then.

        `limit_s` bounds each load. Raises `CallError`, and `SupersededError` where `abandon` was called meanwhile.
        """
        key = (worker.id, worker.incarnation)
        while (under_way := self._loads.get(key)) is not None:
            await asyncio.wait({under_way})
            if not under_way.cancelled() and under_way.exception() is None and under_way.result() >= version:
                return under_way.result()
        if (doubt := self._in_doubt.get(worker.id)) is not None and doubt[0] == worker.incarnation:
            raise CallError(f"{doubt[1]}; it may still be loading", FailureKind.REFUSED)
        task = asyncio.ensure_future(self._load(worker, version, limit_s))
        self._loads[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if task.cancelled():
            raise SupersededError(worker)
        return task.result()

    async def settle(self, worker: Worker) -> None:
        """Wait until no load is under way: a device state may not change beneath one. Bounded by the load's limit."""
        while (under_way := self._loads.get((worker.id, worker.incarnation))) is not None:
            await asyncio.wait({under_way})

    def give_up(self, worker: Worker) -> None:
        """Cancel a load that is under way: the worker leaves, its weights do not matter any more."""
        under_way = self._loads.get((worker.id, worker.incarnation))
        if under_way is not None:
            under_way.cancel()

    async def abandon(self, worker: Worker) -> None:
        """`give_up`, and wait until the load has ended; bounded by `Limits.cancel_s`."""
        self.give_up(worker)
        await self.settle(worker)

    def _ended(self, key: tuple[WorkerId, int], task: "asyncio.Task[int]") -> None:
        del self._loads[key]
        if task.cancelled():
            return
        error = task.exception()  # its waiters may have gone; nobody must be told then
        if isinstance(error, CallError) and error.kind is FailureKind.EXPIRED:
            self._in_doubt[key[0]] = (key[1], error)

    async def _load(self, worker: Worker, version: int, limit_s: float) -> int:
        for reloads_left in reversed(range(1 + RELOADS)):
            snapshot = self._newest()
            if snapshot.version < version:
                raise CallError(
                    f"worker {worker.id}: weight version {version} is wanted, but the newest published is"
                    f" {snapshot.version}",
                    FailureKind.REFUSED,
                )
            try:
                return await self._workers.load(worker, snapshot, limit_s)
            except CallError as error:
                # A snapshot may be withdrawn while it is fetched; a newer one is then there already.
                withdrawn = error.kind is FailureKind.REFUSED and self._newest().version > snapshot.version
                if not withdrawn or not reloads_left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _newest(self) -> WeightSnapshot:
        try:
            return self._source.newest()
        except ValueError as error:
            raise CallError(f"no weights to load: {error}", FailureKind.REFUSED) from error
