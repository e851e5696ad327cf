"""The weight store: versioned snapshots in a folder, handed around by reference (PEARL section 5).

A snapshot is one folder of opaque files (`<dir>/v00000007/…`); the store never reads tensors. A version appears whole
or not at all: it is written under a temporary name, flushed to disk, renamed, and only then entered in
`manifest.json`, which alone says what exists. Versions never go back, also not after a restart.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pearl_executor.ports import WeightSnapshot

_MANIFEST: Final = "manifest.json"
_PARTIAL: Final = ".partial-"


class WeightStoreError(ValueError):
    """A version that goes back, a snapshot that is not there, or a folder that is no weight store."""


class WeightStore:
    """A `WeightSource` over a folder with one writer.

    Keeps the newest `keep` versions.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise WeightStoreError(f"keep is {keep}; a weight store keeps at least the newest version")
        self._dir = Path(directory).absolute()
        self._keep = keep
        self._dir.mkdir(parents=True, exist_ok=True)
        self._snapshots, self._newest = self._read_manifest()
        self._remove_strays()

    @property
    def directory(self) -> Path:
        """Where the snapshots lie."""
        return self._dir

    @property
    def newest_version(self) -> int | None:
        """The highest version that was ever published here; None before the first."""
        return self._newest

    def versions(self) -> tuple[int, ...]:
        """The versions that can be loaded now, oldest first."""
        return tuple(self._snapshots)

    def newest(self) -> WeightSnapshot:
        """The newest published snapshot. Raises `WeightStoreError` before the first publication."""
        if self._newest is None:
            raise WeightStoreError(f"no weights were published in {self._dir} yet; publish an initial version first")
        return self._snapshots[self._newest]

    def publish(
        self, version: int, source: str | os.PathLike[str] | Callable[[Path], None], checksum: str = ""
    ) -> WeightSnapshot:
        """Add `version` and return its snapshot, whose `uri` is a folder.

        `source` is a file or folder to copy, or a function that writes its files into the (empty) folder it is given.
        `checksum` is the digest of names, shapes and values that a worker must report after loading. Publishing the
        newest version again with the same checksum changes nothing, so that a publisher may repeat itself after a
        crash; any other version that is not higher than all before it is an error.
        """
        repeated = self._check_version(version, checksum)
        if repeated is not None:
            return repeated
        partial = self._dir / f"{_PARTIAL}{version:08d}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _write(source, partial)
            size = _flush(partial)
            if size == 0:
                raise WeightStoreError(f"weight version {version} would be empty; its writer wrote nothing")
            final = self._dir / f"v{version:08d}"
            # Of an earlier try that ended before it was on record.
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync_directory(self._dir)
        snapshot = WeightSnapshot(version=version, uri=str(final), bytes=size, checksum=checksum)
        # Nobody loads, from another thread or after a full disk, what a restart would not find.
        self._write_manifest({**self._snapshots, version: snapshot}, version)
        self._snapshots[version] = snapshot
        self._newest = version
        self._prune()
        return snapshot

    def _prune(self) -> None:
        """Remove versions that are not among the newest `keep`."""
        removed = self.versions()[: -self._keep]
        if not removed:
            return
        # The manifest first: a crash in between leaves stray folders, never an entry without its files.
        self._write_manifest({v: s for v, s in self._snapshots.items() if v not in removed}, self._newest)
        for version in removed:
            shutil.rmtree(self._snapshots.pop(version).uri, ignore_errors=True)

    def _check_version(self, version: int, checksum: str) -> WeightSnapshot | None:
        if version < 0:
            raise WeightStoreError(f"weight version {version} is negative")
        if self._newest is None or version > self._newest:
            return None
        if version == self._newest and checksum and self._snapshots[version].checksum == checksum:
            return self._snapshots[version]
        if version == self._newest:
            raise WeightStoreError(f"weight version {version} is published already, with another checksum")
        raise WeightStoreError(
            f"weight version {version} is older than the published {self._newest}; versions never go back"
            " (continue from the newest version after a restart)"
        )

    def _read_manifest(self) -> tuple[dict[int, WeightSnapshot], int | None]:
        path = self._dir / _MANIFEST
        if not path.exists():
            return {}, None
        try:
            manifest = json.loads(path.read_text())
            entries = [WeightSnapshot(**entry) for entry in manifest["snapshots"]]
            newest = manifest["newest"]
        except (ValueError, TypeError, KeyError) as error:
            raise WeightStoreError(f"{path} is not a weight manifest: {error}") from None
        snapshots = {}
        for entry in sorted(entries, key=lambda e: e.version):
            # The folder may have been moved since; entries are found by version, not by their old path.
            folder = self._dir / f"v{entry.version:08d}"
            size = _size(folder)
            if size != entry.bytes:
                raise WeightStoreError(
                    f"weight version {entry.version} in {self._dir} has {size} bytes on disk, {entry.bytes} expected"
                )
            snapshots[entry.version] = WeightSnapshot(entry.version, str(folder), entry.bytes, entry.checksum)
        if newest is not None and newest not in snapshots:
            raise WeightStoreError(f"{path} names version {newest} as newest but does not list it")
        return snapshots, newest

    def _write_manifest(self, snapshots: Mapping[int, WeightSnapshot], newest: int | None) -> None:
        text = json.dumps({"newest": newest, "snapshots": [asdict(s) for s in snapshots.values()]}, indent=1)
        partial = self._dir / f"{_PARTIAL}{_MANIFEST}"
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._dir / _MANIFEST)
        _sync_directory(self._dir)

    def _remove_strays(self) -> None:
        """Remove what a crash left: partial folders, and folders that never made it into the manifest or left it."""
        for path in self._dir.iterdir():
            stray = path.name.startswith(_PARTIAL) or (
                path.name[:1] == "v" and path.name[1:].isdigit() and int(path.name[1:]) not in self._snapshots
            )
            if stray and path.is_dir():
                shutil.rmtree(path)
            elif stray:
                path.unlink()


def _write(source: str | os.PathLike[str] | Callable[[Path], None], folder: Path) -> None:
    if callable(source):
        folder.mkdir()
        source(folder)
        return
    path = Path(source)
    if path.is_dir():
        shutil.copytree(path, folder)
    elif path.is_file():
        folder.mkdir()
        shutil.copy2(path, folder / path.name)
    else:
        raise WeightStoreError(f"no weights at {path}")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _flush(folder: Path) -> int:
    """Bring all of `folder` to disk. Returns the size of its files, bytes."""
    size = 0
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            _sync_directory(path)
        elif path.is_file():
            size += path.stat().st_size
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return size


def _sync_directory(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
