"""Sharded training state on disk: safetensors, by torch's distributed checkpoint, and JSON. Nothing is unpickled.

Every rank writes its own shards (`shard-…safetensors`) and its generator's state (`rng/rank00000.safetensors`), in the
background, and then says so (`written/rank00000`); `state.json` comes last and makes the folder a checkpoint. Loading
reshards to any number of ranks.
"""

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

STATE_FILE = "state.json"
_WRITTEN = "written"
FORMAT = 1


class CheckpointError(ValueError):
    """A folder that is no checkpoint of this trainer: which, and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a checkpoint says beside tensors."""

    version: int
    """Weight version of the parameters in it."""
    optimizer_steps: int
    """AdamW steps made so far."""
    ranks: int
    """How many ranks wrote it."""
    parameters: int
    """Parameters of the whole model."""

    def write(self, folder: Path) -> None:
        """Complete the checkpoint in `folder`."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        (folder / STATE_FILE).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> "TrainerState":
        """State of a complete checkpoint. Raises `CheckpointError`."""
        file = folder / STATE_FILE
        if not file.is_file():
            raise CheckpointError(f"{folder} is no complete checkpoint: it has no {STATE_FILE}")
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            if value.pop("format") != FORMAT:
                raise CheckpointError(f"{file} has another format than {FORMAT}")
            state = TrainerState(**value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{file} is not readable: {error}") from None
        if not all(isinstance(number, int) and number >= 0 for number in asdict(state).values()):
            raise CheckpointError(f"{file} holds a value that is no count")
        return state


def save_shards(
    folder: Path, tensors: "Mapping[str, Tensor]", rng: "Tensor", rank: int, group: "ProcessGroup"
) -> "Future[None]":
    """Copy this rank's shards to host memory and write them in the background. Collective, with the same names.

    `group` is of all ranks that save, on the CPU, and used for nothing else meanwhile. Once the future is done, however
    it ended, the folder tells it to `written`.
    """
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    for part in ("rng", _WRITTEN):
        (folder / part).mkdir(parents=True, exist_ok=True)
    save_file({"cpu": rng}, folder / "rng" / f"rank{rank:05d}.safetensors")
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    answer = async_save(dict(tensors), storage_writer=writer, process_group=group)
    future: Future[None] = answer if isinstance(answer, Future) else answer.upload_completion

    def tell(done: "Future[None]") -> None:
        error = done.exception()
        line = f"{type(error).__name__}: {error}".splitlines()[0] if error is not None else ""
        partial = folder / _WRITTEN / f".rank{rank:05d}"
        # Where the folder is gone, nobody waits for it any more.
        with suppress(FileNotFoundError):
            partial.write_text(line, encoding="utf-8")
            partial.rename(folder / _WRITTEN / f"rank{rank:05d}")

    future.add_done_callback(tell)
    return future


def written(folder: Path, ranks: int) -> bool:
    """Whether all ranks have written their shards. Raises `CheckpointError` naming a rank that could not."""
    marks = {rank: folder / _WRITTEN / f"rank{rank:05d}" for rank in range(ranks)}
    there = {rank: mark.read_text(encoding="utf-8") for rank, mark in marks.items() if mark.is_file()}
    for rank, failure in there.items():
        if failure:
            raise CheckpointError(f"rank {rank} of {ranks} could not write its shards: {failure}")
    return len(there) == ranks


def forget_marks(folder: Path) -> None:
    """Remove what only mattered while the folder was written."""
    shutil.rmtree(folder / _WRITTEN, ignore_errors=True)


def load_shards(
    folder: Path, tensors: "Mapping[str, Tensor]", rank: int, group: "ProcessGroup | None" = None
) -> "Tensor | None":
    """Fill `tensors` in place. Collective over `group`.

    Returns this rank's generator state, None where fewer ranks wrote it.
    """
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state: dict[str, Any] = dict(tensors)
    load(state, storage_reader=HuggingFaceStorageReader(path=str(folder)), process_group=group)
    file = folder / "rng" / f"rank{rank:05d}.safetensors"
    if not file.is_file():
        return None
    generator: Tensor = load_file(file)["cpu"]
    return generator
