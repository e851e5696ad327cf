"""Checkpoints of a run: the trainer's state, where the rollout stands, and which step comes next.

A checkpoint is a folder `step-00000010` that holds `trainer/` and, written last, `run.json`; without that file it does
not count.
"""

import asyncio
import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from pearl_rl.errors import CommandError
from pearl_rl.rollout.ledger import Position
from pearl_rl.training.rank_group import CheckpointLateError, TrainerError, TrainerLostError

_log = logging.getLogger(__name__)
_RUN: Final = "run.json"
_TRAINER: Final = "trainer"
COMPLETE: Final = f"checkpoints/step-*/{_RUN}"
"""What a run folder with a complete checkpoint has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    step: int
    """Training steps that were completed."""
    version: int
    """Weight version of its parameters."""
    position: Position

    @property
    def trainer(self) -> Path:
        """The trainer's part."""
        return self.folder / _TRAINER

    @property
    def model(self) -> Path:
        """Folder of the run's model (config, tokenizer, first weights)."""
        return self.folder.parent.parent / "model"


def find(source: Path) -> Checkpoint:
    """The newest checkpoint of a run folder, or the checkpoint that `source` itself is. Raises `CommandError`."""
    if (source / _RUN).is_file():
        return _read(source)
    found = sorted(file.parent for file in source.glob(COMPLETE))
    if not found:
        raise CommandError(
            f"run.resume_from = {source}: holds no complete checkpoint; give the folder of a run that has one"
        )
    return _read(found[-1])


def _read(folder: Path) -> Checkpoint:
    try:
        value = json.loads((folder / _RUN).read_text(encoding="utf-8"))
        return Checkpoint(
            folder=folder,
            step=int(value["step"]),
            version=int(value["version"]),
            position=Position(**value["position"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{folder / _RUN}: is no checkpoint's record ({error})") from None


class Saving(Protocol):
    """What a checkpoint needs of the trainer."""

    @property
    def version(self) -> int:
        """Weight version of what the ranks hold."""
        ...

    async def begin_checkpoint(self, path: Path) -> "asyncio.Task[None]":
        """See `LocalTrainer.begin_checkpoint`."""
        ...


class CheckpointWriter:
    """Writes a checkpoint every `every` steps (0: none before the last) and keeps the newest `keep`.

    Only the copy of the state holds training up; the files are written while it goes on, one checkpoint at a time.
    One that a lost rank cut short, or that took too long, is missing, and a word in the log; the run goes on, and ranks
    that are lost or stand still begin anew at the next update.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Saving,
        *,
        every: int,
        keep: int,
        last: int,
    ) -> None:
        self._folder = folder
        self._trainer = trainer
        self._every = every
        self._keep = keep
        self._last = last
        self._writing: asyncio.Task[None] | None = None

    async def completed(self, step: int, position: Position) -> None:
        """A step is complete and training holds its memory: begin a checkpoint, if it is time; the last one to its end.

        Raises the `TrainerError` of the checkpoint before, where that could not be written, and of the last one.
        """
        if step == self._last or (self._every and step % self._every == 0):
            try:
                await self._settle()
            except (TrainerLostError, CheckpointLateError) as error:
                _log.warning("a checkpoint is missing: %s", error)
            try:
                await self._begin(step, position)
            except TrainerLostError as error:
                if step == self._last:
                    raise
                _log.warning("the checkpoint of step %d is missing: %s", step, error)

    async def write(self, step: int, position: Position) -> None:
        """Write the state after `step`, to its end; before any step, so that a run that is killed early goes on."""
        await self._begin(step, position)
        await self._settle()

    async def _begin(self, step: int, position: Position) -> None:
        await self._settle()
        target = self._folder / f"step-{step:08d}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        record = {"step": step, "version": self._trainer.version, "position": asdict(position)}
        saving = await self._trainer.begin_checkpoint(target / _TRAINER)
        self._writing = asyncio.get_running_loop().create_task(self._complete(saving, target, record))
        if step == self._last:
            await self._settle()

    @property
    def newest(self) -> Path | None:
        """The trainer's part of the newest complete checkpoint of this run; None before the first."""
        found = sorted(file.parent for file in self._folder.glob(f"step-*/{_RUN}"))
        return found[-1] / _TRAINER if found else None

    async def aclose(self) -> None:
        """Complete the checkpoint under way; one that fails leaves none, and a word in the log."""
        try:
            await self._settle()
        except TrainerError as error:
            _log.warning("the last checkpoint is missing: %s", error)

    async def _settle(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def _complete(self, saving: "asyncio.Task[None]", target: Path, record: dict[str, Any]) -> None:
        await saving
        _finish(target, record)
        folders = sorted(self._folder.glob("step-*"))
        kept = [folder for folder in folders if (folder / _RUN).is_file()][-self._keep :]
        # One is written at a time: whatever else is there is old, or of one that is missing.
        for old in (folder for folder in folders if folder not in kept):
            await asyncio.to_thread(shutil.rmtree, old)


def _finish(target: Path, record: dict[str, Any]) -> None:
    """Write what makes `target` count."""
    partial = target / f"{_RUN}.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(target / _RUN)
