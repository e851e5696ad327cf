"""Which way new weights take to a server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pearl_executor.engines.sglang.options import SglangOptions, SglangTimeouts, WeightTransport
from pearl_executor.engines.sglang.weights import DiskTransport, Transport


@asynccontextmanager
async def make_transport(options: SglangOptions, timeouts: SglangTimeouts, folder: Path) -> AsyncIterator[Transport]:
    """The transport that the options name; what it started ends with the `with` block."""
    del timeouts, folder
    assert options.weights is WeightTransport.DISK
    yield DiskTransport()
