"""Weights through Ray's object store: put once a version, fetched once a node, loaded there by every worker.

The store holds the newest versions only; a reference that is dropped frees its objects on all nodes.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pearl_executor.ports import WeightSnapshot, WorkerError
from pearl_executor.runtimes.local.processes import ChildProcess, ProcessError
from pearl_executor.runtimes.ray.cluster import require_ray
from pearl_executor.runtimes.ray.processes import RayProcesses

_KEPT_VERSIONS: Final = 2


@dataclass(frozen=True, slots=True)
class _Objects:
    """The files of one snapshot in the object store."""

    names: tuple[str, ...]
    contents: tuple[Any, ...]


class ObjectSnapshots:
    """Hands snapshots of the run's weight store to workers on any node."""

    def __init__(self, processes: RayProcesses) -> None:
        self._processes = processes
        self._put: dict[int, asyncio.Future[_Objects]] = {}

    async def stage(self, child: ChildProcess, snapshot: WeightSnapshot) -> str:
        """The folder on the child's node that holds `snapshot` now. Raises `WorkerError`."""
        pending = self._put.get(snapshot.version)
        if pending is None:
            pending = asyncio.ensure_future(asyncio.to_thread(_put, Path(snapshot.uri)))
            self._put[snapshot.version] = pending
            for old in sorted(self._put)[:-_KEPT_VERSIONS]:
                del self._put[old]
        try:
            objects = await asyncio.shield(pending)
        except OSError as error:
            self._put.pop(snapshot.version, None)
            raise WorkerError(f"weights of version {snapshot.version} cannot be read: {error}") from error
        name = f"v{snapshot.version:08d}-{snapshot.checksum or 'unchecked'}"
        try:
            return await self._processes.stage(child, name, objects.names, objects.contents)
        except ProcessError as error:
            raise WorkerError(str(error)) from error


def _put(folder: Path) -> _Objects:
    """Put every file of `folder` into the object store, as bytes that workers map and do not copy."""
    import numpy as np

    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
    root = folder if folder.is_dir() else folder.parent
    names = tuple(str(file.relative_to(root)) for file in files)
    return _Objects(names, tuple(require_ray().put(np.fromfile(file, dtype=np.uint8)) for file in files))
