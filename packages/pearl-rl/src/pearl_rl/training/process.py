"""The trainer as the control plane sees it: FSDP2 ranks in child processes, with deadlines. No torch here."""

import asyncio
import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pearl_executor.ports import MemoryReport, WeightSnapshot
from pearl_executor.runtimes.local.frames import Frame
from pearl_executor.runtimes.local.processes import ProcessServer
from pearl_rl.training.batch import TrainBatch, plan_update
from pearl_rl.training.checkpoint import CheckpointError, TrainerState, forget_marks, written
from pearl_rl.training.options import RefActor, TrainerOptions
from pearl_rl.training.rank_group import (
    CheckpointLateError,
    RankGroup,
    TrainerError,
    TrainerLostError,
    prepare_folder,
)
from pearl_rl.training.results import RankTimes, UpdateResult, combine_sums
from pearl_rl.training.shards import encode_shard, join_shards

PRELOAD: Final = ("pearl_rl.training.rank",)
"""What the fork server imports so that ranks are up in a moment."""

_KEPT_SNAPSHOTS: Final = 2
_LOOK_S: Final = 0.02
"""Pause between looks at whether a checkpoint is written, or gone."""
_DISCARDS: Final = 50
"""How often a folder is removed into which a rank may still be writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLimits:
    """Longest waits, seconds."""

    start_s: float = 120.0
    update_s: float = 120.0
    checkpoint_s: float = 120.0
    memory_s: float = 30.0
    """A release or a resume."""


class LocalTrainer:
    """`TrainingPort` over FSDP2 ranks on this machine.

    One call at a time, each with a deadline. All but `stop` and `kill` raise `TrainerError`s that name the rank at
    fault; the ranks are then gone and every later call raises `TrainerLostError` until `start`.
    """

    def __init__(
        self,
        forks: ProcessServer,
        model_path: Path,
        folder: Path,
        options: TrainerOptions,
        *,
        ranks: int = 2,
        update_s: float = 0.0,
        limits: TrainerLimits | None = None,
        threads: int = 1,
    ) -> None:
        """`folder` is this trainer's own (snapshots, parked tensors); `forks` should preload `PRELOAD`.

        `update_s` paces training to an emulated device: an update lasts at least this long, seconds. `threads` are each
        rank's compute threads.
        """
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; training needs at least 1")
        if options.reference_rank and ranks < 2:
            raise ValueError(f"ranks is {ranks}; a reference rank needs at least one more for the actor")
        self.options = options
        self.ref_actor = options.ref_actor
        """Where the reference works in the next update; may change between updates, within what the ranks hold."""
        self.timed = False
        """Whether updates say what each rank took."""
        self.forming_s = 0.0
        """What it took to start all ranks, the last time."""
        self._model_path = model_path.absolute()
        self._folder = folder.absolute()
        self._update_s = update_s
        self._limits = limits or TrainerLimits()
        self._threads = threads
        self._group = RankGroup(forks, ranks)
        self._version = 0
        self._newest: WeightSnapshot | None = None
        self._released = False
        self._saving: asyncio.Task[None] | None = None
        self._attempts = itertools.count(1)
        self._partial: Path | None = None
        """Where the newest checkpoint that began was written before it was complete."""

    @property
    def ranks(self) -> int:
        """All ranks, the reference's included."""
        return self._group.ranks

    @property
    def version(self) -> int:
        """Weight version of what the ranks hold. Never goes back."""
        return self._version

    @property
    def newest(self) -> WeightSnapshot:
        """The weights of `version`. Raises `TrainerLostError` before `start`."""
        if self._newest is None:
            raise TrainerLostError("the trainer has no weights: it was not started")
        return self._newest

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks; empty where none lives."""
        return self._group.pids

    async def start(self) -> WeightSnapshot:
        """Start all ranks on the model and write its weights: version 0 at first, a new one after a restart."""
        await self._begin(None)
        return await self._publish(0 if self._newest is None else self._version + 1, self._limits.start_s)

    async def recover(self, checkpoint: Path | None = None) -> None:
        """Start all ranks anew on the newest weights, which keep their version.

        The optimizer takes the state of `checkpoint` (of these weights or of older ones), or begins afresh. Raises
        `CheckpointError` for a folder that is none, before any rank is touched.
        """
        state = None if checkpoint is None else TrainerState.read(checkpoint)
        await self._begin(Path(self.newest.uri))
        if checkpoint is not None and state is not None:
            await self._load(checkpoint, state, moments_only=True)

    async def _begin(self, weights: Path | None) -> None:
        """Start all ranks on the model, with `weights` of its own kind in place of its own."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await self._group.kill()
        limits = self._limits
        arguments = {
            "rendezvous": str(prepare_folder(self._folder)),
            "listen": self._group.address,
            "folder": str(self._folder),
            "options": self.options.to_json(),
            "threads": self._threads,
            # Later than any call's own deadline: the control plane notices first and says what it waited for.
            "collective_timeout_s": max(limits.start_s, limits.update_s, limits.checkpoint_s, limits.memory_s) + 5.0,
        }
        await self._group.spawn("pearl_rl.training.rank:rank_main", arguments)
        self._released = False
        met = await self._group.call_all("meet", {}, limits.start_s)
        head = {
            "model_path": str(self._model_path),
            "weights_path": str(weights or self._model_path),
            "store": met[0].head["store"],
        }
        await self._group.call_all("start", head, limits.start_s)
        self.forming_s = loop.time() - began_s

    async def form_anew(self, *, reference_rank: bool) -> None:
        """Start all ranks anew, decoupled (one holds the reference alone) or colocated; state and version stay.

        Where ranks are lost on the way, `recover` goes on with what they were to become.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        folder = self._folder / "formed-anew"
        await self.save_checkpoint(folder)
        self.ref_actor = RefActor.DECOUPLED if reference_rank else RefActor.COLOCATED
        self.options = replace(self.options, ref_actor=self.ref_actor, reference_rank=reference_rank)
        await self.go_on(self.newest, folder)
        await _discard(folder)
        self.forming_s = loop.time() - began_s

    async def update(self, batch: TrainBatch) -> UpdateResult:
        """Train on `batch` and write the new weights under the next version."""
        self._require_memory("update")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        options = self.options
        actors = self._group.ranks - options.reference_rank
        plan = plan_update(batch, actors, options.minibatches, options.micro_batch_tokens, options.loss.aggregation)
        shards = [encode_shard(batch, plan, rank) for rank in range(actors)]
        answers = await self._group.call_each("update", self._messages(shards), self._limits.update_s)
        snapshot = await self._publish(self._version + 1, self._limits.update_s)
        compute_s = loop.time() - began_s
        await asyncio.sleep(max(0.0, self._update_s - compute_s))
        return UpdateResult(
            version=snapshot.version,
            snapshot_path=Path(snapshot.uri),
            snapshot_bytes=snapshot.bytes,
            checksum=snapshot.checksum,
            metrics=combine_sums(
                batch, [answer.head["sums"] for answer in answers[:actors]], options.epochs, compute_s
            ),
            duration_s=loop.time() - began_s,
            times=tuple(RankTimes(**answer.head["times"]) for answer in answers) if self.timed else (),
        )

    def _messages(self, shards: list[tuple[dict[str, Any], bytes]]) -> list[tuple[dict[str, Any], bytes]]:
        """Each actor's shard, and all of them for the reference's rank where there is one."""
        messages = [*shards, join_shards(shards)] if self.options.reference_rank else shards
        told = {"ref_actor": str(self.ref_actor), **({"timed": True} if self.timed else {})}
        return [({**head, **told}, body) for head, body in messages]

    async def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, generators and counters to the folder `path`, whole or not at all.

        A folder that is there already is replaced once the new one is complete.
        """
        await (await self.begin_checkpoint(path))

    async def begin_checkpoint(self, path: Path) -> "asyncio.Task[None]":
        """`save_checkpoint` in two parts: returns once the state is copied, and training may go on.

        The task ends when the folder is complete; it raises `TrainerError` where a rank could not write,
        `TrainerLostError` where one is lost, and `CheckpointLateError` where it takes longer than a checkpoint may. One
        checkpoint is written at a time.
        """
        self._require_memory("save_checkpoint")
        await self._settle_checkpoint()
        # A name of its own: where an earlier one failed, its ranks may still be writing.
        partial = _fresh(path.with_name(f".partial-{path.name}-{next(self._attempts)}"))
        try:
            answers = await self._group.call_all("save", {"folder": _absolute(partial)}, self._limits.checkpoint_s)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        before, self._partial = self._partial, partial
        if before is not None:
            # Where that one failed, a rank may have written on after its folder was removed; it is through by now.
            await _discard(before)
        head = answers[0].head
        state = TrainerState(
            version=self._version,
            optimizer_steps=head["optimizer_steps"],
            ranks=self._group.ranks - self.options.reference_rank,
            parameters=head["parameters"],
        )
        self._saving = asyncio.get_running_loop().create_task(self._complete_checkpoint(partial, path, state))
        return self._saving

    async def _complete_checkpoint(self, partial: Path, path: Path, state: TrainerState) -> None:
        """Wait until every rank has written its shards, and make the folder a checkpoint."""
        limit_s = self._limits.checkpoint_s
        try:
            async with asyncio.timeout(limit_s):
                while not written(partial, state.ranks):
                    if self._group.lost is not None:
                        raise TrainerLostError(f"the checkpoint {path.name} is not complete: {self._group.lost}")
                    await asyncio.sleep(_LOOK_S)
            _put_in_place(partial, path, state)
        except TimeoutError:
            raise CheckpointLateError(f"the checkpoint {path.name} was not written within {limit_s:g} s") from None
        except CheckpointError as error:
            raise TrainerError(f"the checkpoint {path.name} is not complete: {error}") from error
        finally:
            await _discard(partial)

    async def _settle_checkpoint(self) -> None:
        """Wait for the checkpoint under way, however it ends; whoever began it is told."""
        if self._saving is not None:
            await asyncio.wait({self._saving})

    async def go_on(self, newest: WeightSnapshot, checkpoint: Path) -> None:
        """Start all ranks on the weights that a control plane before this one published last; they keep their version.

        Nothing that was trained is trained again. Where `checkpoint` is of these weights, its state is taken whole;
        where it is of older ones, the optimizer takes its moments, and master weights are the published ones. Raises
        `CheckpointError` for a folder that is none, before any rank is started.
        """
        state = TrainerState.read(checkpoint)
        await self._begin(Path(newest.uri))
        self._version, self._newest = newest.version, newest
        await self._load(checkpoint, state, moments_only=state.version != newest.version)

    async def load_checkpoint(self, path: Path) -> int:
        """Continue from a checkpoint of any number of ranks. Returns the version that its weights have from now on.

        That version is above the checkpoint's and the present one. Raises `CheckpointError` for a folder that is none,
        before any rank is touched.
        """
        self._require_memory("load_checkpoint")
        state = TrainerState.read(path)
        await self._load(path, state, moments_only=False)
        version = max(state.version, self._version) + 1
        await self._publish(version, self._limits.checkpoint_s)
        return version

    async def _load(self, path: Path, state: TrainerState, *, moments_only: bool) -> None:
        arguments: Mapping[str, Any] = {
            "folder": _absolute(path),
            "optimizer_steps": state.optimizer_steps,
            "parameters": state.parameters,
            "moments_only": moments_only,
        }
        await self._group.call_all("load", arguments, self._limits.checkpoint_s)

    async def release(self) -> MemoryReport:
        """Give device memory back on all ranks; measured bytes, summed over them."""
        self._require_memory("release")
        report = _sum_reports(await self._group.call_all("release", {}, self._limits.memory_s))
        self._released = True
        return report

    async def resume(self) -> MemoryReport:
        """Take the device memory again; training goes on as if nothing had been."""
        if not self._released:
            raise TrainerError("resume: the training memory is not released")
        report = _sum_reports(await self._group.call_all("resume", {}, self._limits.memory_s))
        self._released = False
        return report

    async def stop(self) -> None:
        """End all ranks in order, or for certain where one does not answer. No effect where none lives.

        A checkpoint that is being written is completed first.
        """
        await self._settle_checkpoint()
        await self._group.stop()

    async def kill(self) -> None:
        """End all ranks for certain, whatever they do; returns when they are gone."""
        await self._group.kill()

    def _require_memory(self, call: str) -> None:
        """Refuse without a word to the ranks: they are fine, and a refusal by them would end them."""
        if self._released:
            raise TrainerError(f"{call}: the training memory is released; resume it first")

    async def _publish(self, version: int, timeout_s: float) -> WeightSnapshot:
        folder = _fresh(self._folder / "weights" / f"v{version:08d}")
        answers = await self._group.call_all("write_weights", {"folder": str(folder)}, timeout_s)
        for file in sorted(self._model_path.iterdir()):
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copy2(file, folder / file.name)
        head = answers[0].head
        self._version = version
        self._newest = WeightSnapshot(version, str(folder), head["bytes"], head["checksum"])
        for old in sorted(folder.parent.iterdir())[:-_KEPT_SNAPSHOTS]:
            # In a thread: whole weights, whose removal would hold the control plane up.
            await asyncio.to_thread(shutil.rmtree, old)
        return self._newest


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


async def _discard(folder: Path) -> None:
    """Remove a folder into which ranks may still be writing: again until it is gone, for a moment."""
    for _ in range(_DISCARDS):
        if await asyncio.to_thread(_removed, folder):
            return
        await asyncio.sleep(_LOOK_S)


def _removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _put_in_place(partial: Path, path: Path, state: TrainerState) -> None:
    """Complete a checkpoint and give it its name."""
    forget_marks(partial)
    state.write(partial)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)


def _absolute(path: Path) -> str:
    """Ranks have their own working directory."""
    return str(path.absolute())


def _sum_reports(answers: Sequence[Frame]) -> MemoryReport:
    before = sum(answer.head["before_bytes"] for answer in answers)
    after = sum(answer.head["after_bytes"] for answer in answers)
    return MemoryReport(before, after)
