"""Workers that let requests stand still: asked whether they live, and reported as failed where they do not answer.

A stopped process keeps its place in the table: nothing ends, nothing fails. The router notices that no token comes, and
only a question to the process itself tells a slow engine from one that hangs.
"""

import asyncio
from collections.abc import Callable

from pearl_executor.ports import WorkerError
from pearl_rl.control.refit import Sampled
from pearl_state.events import Event, WorkerFailed
from pearl_state.worker import Worker, WorkerId


class StallProbe:
    """Judges workers that the router suspects. Each question is bounded; a worker is asked one at a time."""

    def __init__(
        self, workers: Sampled, post: Callable[[Event], None], *, probe_s: float, most_stalls: int = 8
    ) -> None:
        """`most_stalls`: attempts in a row that a worker may let stand still though it answers."""
        self._workers = workers
        self._post = post
        self._probe_s = probe_s
        self._most_stalls = most_stalls
        self._asked: dict[tuple[WorkerId, int], asyncio.Task[None]] = {}

    def suspect(self, worker: Worker, cause: str, stalls: int) -> None:
        """An attempt on `worker` stood still, the `stalls`-th in a row. `WorkerFailed` follows where it is at fault."""
        key = (worker.id, worker.incarnation)
        if key not in self._asked:
            self._asked[key] = asyncio.get_running_loop().create_task(self._judge(worker, cause, stalls))
            self._asked[key].add_done_callback(lambda _task: self._asked.pop(key))

    async def aclose(self) -> None:
        """Ask nobody any more."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _judge(self, worker: Worker, cause: str, stalls: int) -> None:
        try:
            async with asyncio.timeout(self._probe_s):
                await self._workers.samples(worker)
        except TimeoutError:
            self._accuse(worker, f"{cause}; and it did not answer within {self._probe_s:g} s")
        except WorkerError as error:
            self._accuse(worker, f"{cause}; and then: {error}")
        else:
            if stalls >= self._most_stalls:
                self._accuse(worker, f"{cause}; it answers, but {stalls} attempts in a row stood still")

    def _accuse(self, worker: Worker, cause: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._post(WorkerFailed(now_s=now_s, worker=worker.id, incarnation=worker.incarnation, cause=cause))
