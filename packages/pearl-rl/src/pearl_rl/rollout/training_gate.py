"""Where training waits until all of its GPUs are its own again."""

import asyncio


class GrantTimeoutError(TimeoutError):
    """Training was not given its GPUs in time; the message says who holds them."""


class TrainingGate:
    """Between the Pipeline Scheduler, which asks and waits, and the Elastic Scheduler, which grants.

    A grant answers the request before it, once; one that nobody asked for opens nothing.
    """

    def __init__(self) -> None:
        self._pending: asyncio.Future[None] | None = None

    def request(self) -> None:
        """Ask for the GPUs: the next grant is for this request."""
        self._pending = asyncio.get_running_loop().create_future()

    def grant(self) -> None:
        """The training GPUs are training's. No effect where nobody asked."""
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(None)

    async def wait_grant(self, timeout_s: float) -> None:
        """Return once the request is granted. Raises `TimeoutError` after `timeout_s`."""
        if self._pending is None:
            raise RuntimeError("training waits for a grant that it did not request")
        try:
            async with asyncio.timeout(timeout_s):
                await self._pending
        finally:
            self._pending = None
