"""The connection to a Ray cluster: an existing one by its address, or one of this machine that ends with the run.

Token authentication stays as Ray 2.60 has it, on: a cluster of this machine draws its token, and for an existing one
`RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH` must name that cluster's.
"""

import asyncio
import os
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Self

from pearl_executor.runtimes.local.processes import ProcessError

LOOPBACK: Final = "127.0.0.1"
_CONNECT_TIMEOUT_S: Final = 180.0
_SHUTDOWN_TIMEOUT_S: Final = 30.0
_MISSING: Final = "the Ray runtime needs the package ray, which is not installed; install pearl-executor[ray]"


class RayMissingError(ProcessError):
    """The extra `ray` is not installed."""


def require_ray() -> ModuleType:
    """The package `ray`. Raises `RayMissingError` with what to install."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise RayMissingError(_MISSING) from error


class RayCluster:
    """A connection of this process. Use as an async context manager.

    `address` is the cluster's (`host:port`, or `auto`); empty starts one on this machine, bound to loopback, with
    `gpus` logical GPUs. Names of actors are within `namespace`.
    """

    def __init__(self, address: str = "", *, namespace: str, gpus: int = 0) -> None:
        self.namespace = namespace
        self._address = address
        self._gpus = gpus
        self._ours = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Connect. Raises `ProcessError` that names the address and Ray's own first words."""
        ray = require_ray()
        where = f"the Ray cluster at {self._address}" if self._address else "a Ray cluster of this machine"
        # Ray's own reports on usage go to its makers; a run tells nobody unless a person chose so.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Of a cluster that it starts here: engines are no background work, as Ray's workers are by default.
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await asyncio.to_thread(ray.init, **self._options())
        except TimeoutError:
            raise ProcessError(f"{where} did not answer within {_CONNECT_TIMEOUT_S:g} s") from None
        except Exception as error:
            # Ray has no one kind of error for a start that fails; some are plain `Exception`s.
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ProcessError(f"cannot use {where}: {first}") from error
        self._ours = True

    def _options(self) -> dict[str, Any]:
        common: dict[str, Any] = {
            "namespace": self.namespace,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        if self._address:
            return {**common, "address": self._address}
        return {
            **common,
            "address": "local",
            "num_gpus": self._gpus,
            "include_dashboard": False,
            "_node_ip_address": LOOPBACK,
        }

    @property
    def host(self) -> str:
        """The address of this machine in the cluster, at which its processes reach this one."""
        host: str = require_ray().util.get_node_ip_address() if self._address else LOOPBACK
        return host

    @property
    def loopback(self) -> str:
        """The loopback address where all nodes are this machine, for children's own sockets; empty otherwise."""
        return "" if self._address else LOOPBACK

    @property
    def node(self) -> str:
        """Ray's id of the node that this process is on."""
        node: str = require_ray().get_runtime_context().get_node_id()
        return node

    async def aclose(self) -> None:
        """Disconnect; a cluster of this machine ends."""
        if not self._ours:
            return
        self._ours = False
        async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
            await asyncio.to_thread(require_ray().shutdown)
