"""SGLang servers on the nodes of a Ray cluster: each beside an actor on its GPUs' bundle, which starts and ends it."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from pearl_executor.engines.sglang.launch import LaunchError, LaunchOrder, Place
from pearl_executor.engines.sglang.options import INSTALL, VERSION, MemoryProbe
from pearl_executor.ports import WeightSnapshot, WorkerError
from pearl_executor.runtimes.local.channels import ChannelError
from pearl_executor.runtimes.local.frames import Frame
from pearl_executor.runtimes.local.processes import ChildProcess, ProcessError
from pearl_executor.runtimes.ray.processes import RayProcesses
from pearl_executor.runtimes.ray.snapshots import ObjectSnapshots
from pearl_executor.runtimes.ray.survey import Questions, survey

_log = logging.getLogger(__name__)
_CALL_S: Final = 30.0


class RayLauncher:
    """A `Launcher` over a cluster. `interpreter` is the same command on every node."""

    def __init__(self, processes: RayProcesses, interpreter: Sequence[str], kill_command: Sequence[str] = ()) -> None:
        self._processes = processes
        self._interpreter = list(interpreter)
        self._kill_command = list(kill_command)
        self._snapshots = ObjectSnapshots(processes)
        self._placed: dict[str, ChildProcess] = {}

    async def check(self) -> None:
        """Ask every node that has GPUs which SGLang it has. Raises `LaunchError` naming what to install."""
        facts = [node for node in await survey(Questions(interpreter=tuple(self._interpreter))) if node.gpus]
        # Ray lists a node for a while after it is gone; a start on one that is there will say what is wrong.
        silent = [node for node in facts if node.error]
        for node in silent:
            _log.warning("node %s does not say which SGLang it has: %s", node.host, node.error)
        wrong = next((node for node in facts if not node.error and node.sglang != VERSION), None)
        if wrong is not None:
            raise LaunchError(f"engine.sglang.interpreter on {wrong.host}: {wrong.sglang}, not {VERSION}; {INSTALL}")
        if len(silent) == len(facts):
            raise LaunchError(
                f"engine.sglang.interpreter: none of {len(facts)} nodes with GPUs says which SGLang it has"
            )

    async def place(self, name: str, gpus: str, host: str) -> Place:
        """Start the actor on the bundle of `gpus` and ask where it came to. Raises `WorkerError`."""
        del host
        arguments = {
            "interpreter": self._interpreter,
            "kill_command": self._kill_command,
            "listen": self._processes.peer_address(name),
        }
        try:
            child = await self._processes.spawn(
                name,
                "pearl_executor.runtimes.ray.sglang_host:main",
                arguments,
                gpus=[int(gpu) for gpu in gpus.split(",") if gpu],
            )
        except ProcessError as error:
            raise LaunchError(str(error)) from error
        self._placed[name] = child
        try:
            answer = (await child.channel.call("place", timeout_s=_CALL_S)).head
        except ChannelError as error:
            await self._give_up(name)
            raise LaunchError(f"{name}: its node does not say where it is: {error}") from error
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._give_up(name)))
            raise
        http, bootstrap, gate = answer["ports"]
        return Place(answer["host"], (http, bootstrap, gate), answer["gpus"])

    async def launch(self, order: LaunchOrder) -> "RayServer":
        """Start the server beside its actor. Raises `LaunchError`."""
        child = self._placed[order.name]
        head = {"name": order.name, "args": list(order.args), "env": dict(order.env), "secrets": list(order.secrets)}
        try:
            answer = (await child.channel.call("launch", head, timeout_s=_CALL_S)).head
        except ChannelError as error:
            await self._give_up(order.name)
            raise LaunchError(f"{order.name}: {self._interpreter[0]} cannot be run on its node: {error}") from error
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self._give_up(order.name)))
            raise
        del self._placed[order.name]
        return RayServer(child, answer["pid"], answer["log"], self._processes, self._snapshots)

    async def _give_up(self, name: str) -> None:
        child = self._placed.pop(name, None)
        if child is not None:
            await self._processes.kill(child)


@dataclass(slots=True, eq=False)
class RayServer:
    """A server on some node."""

    child: ChildProcess
    pid: int
    """On its node."""
    log: str
    processes: RayProcesses
    snapshots: ObjectSnapshots
    exited: "asyncio.Future[str]" = field(init=False)

    def __post_init__(self) -> None:
        self.exited = asyncio.get_running_loop().create_future()
        self.child.channel.attach(self._noticed, self._hung_up)

    async def used_bytes(self, probe: MemoryProbe) -> int:
        """Measured on its node."""
        answer = await self._ask("used", {"probe": "process" if probe is MemoryProbe.PROCESS else "nvidia-smi"})
        return int(answer.head["bytes"])

    async def fetch(self, snapshot: WeightSnapshot) -> str:
        """A copy on its node's disk, through the object store, once a node."""
        return await self.snapshots.stage(self.child, snapshot)

    async def end(self, grace_s: float) -> None:
        """End the server by its actor, then the actor, confirmed by its node."""
        with suppress(ChannelError):
            await self.child.channel.call("end", {"grace_s": grace_s}, timeout_s=grace_s + _CALL_S)
        try:
            await self.processes.kill(self.child)
        except ProcessError as error:
            raise WorkerError(str(error)) from error
        self.child.channel.close()
        self._tell(self.child.how_it_ended())

    async def _ask(self, op: str, arguments: dict[str, str]) -> Frame:
        try:
            return await self.child.channel.call(op, arguments, timeout_s=_CALL_S)
        except ChannelError as error:
            raise WorkerError(f"{self.child.name}: {error}") from error

    def _noticed(self, frame: Frame) -> None:
        if frame.head["op"] == "ended":
            self._tell(f"{frame.head['how']}; see {self.log} on its node")

    def _hung_up(self) -> None:
        self._tell(self.child.how_it_ended())

    def _tell(self, how: str) -> None:
        if not self.exited.done():
            self.exited.set_result(how)
