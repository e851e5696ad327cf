"""Sharded training state on disk: safetensors, by torch's distributed checkpoint, and JSON. Nothing is unpickled.

Every rank writes its own shards (`shard-…safetensors`) and its generator's state (`rng/rank00000.safetensors`);
`state.json` comes last and makes the folder a checkpoint. Loading reshards to any number of ranks.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

STATE_FILE = "state.json"
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
    folder: Path, tensors: "Mapping[str, Tensor]", rng: "Tensor", rank: int, group: "ProcessGroup | None" = None
) -> None:
    """Write this rank's shards and generator state. Collective: all ranks of `group` call it with the same names."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    save(dict(tensors), storage_writer=writer, process_group=group)
    (folder / "rng").mkdir(exist_ok=True)
    save_file({"cpu": rng}, folder / "rng" / f"rank{rank:05d}.safetensors")


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
