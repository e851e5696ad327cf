"""What an import found, and the reader that the mappings of all frameworks share."""

import math
import os
from dataclasses import dataclass, field
from typing import Any, Final

from pearl_rl.importing.shell import UNKNOWN
from pearl_rl.importing.tree import Flat

Scalar = bool | int | float | str

_NEVER: Final = "not a setting of PEARL"


@dataclass(slots=True)
class Imported:
    """Settings with where each came from, and one line for each key without a counterpart."""

    framework: str
    settings: dict[str, Scalar] = field(default_factory=dict)
    """Our dotted key → value."""
    origins: dict[str, str] = field(default_factory=dict)
    """Our dotted key → their keys."""
    unsupported: list[str] = field(default_factory=list)

    def put(self, key: str, value: Scalar, origin: str) -> None:
        """Set one of ours."""
        self.settings[key] = value
        self.origins[key] = origin

    def drop(self, theirs: str, why: str) -> None:
        """Say why one of theirs is not taken over, in one line whatever their values hold."""
        self.unsupported.append(" ".join(f"{theirs}: {why}".split()))


class Source:
    """Their keys; remembers which were read, so that the rest can be named."""

    def __init__(self, flat: Flat, out: Imported) -> None:
        self._flat = flat
        self._out = out
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._flat.get(key) is not None

    def get(self, key: str) -> Any:
        """The value as it is; None where it is missing."""
        self._read.add(key)
        return self._flat.get(key)

    def number(self, key: str) -> float | None:
        """A number; None where it is missing or not one, which is then named."""
        value = self.get(key)
        if value is None:
            return None
        try:
            if isinstance(value, bool) or UNKNOWN in str(value):
                raise ValueError
            number = float(value)
            if not math.isfinite(number):
                raise ValueError
            return number
        except (TypeError, ValueError, OverflowError):
            shown = "a value that only its shell knows" if UNKNOWN in str(value) else f"'{str(value)[:40]}'"
            self._out.drop(key, f"{shown} is not a number; set it by hand")
            return None

    def whole(self, key: str) -> int | None:
        """A whole number; None as `number`."""
        value = self.number(key)
        return None if value is None or abs(value) > 1e15 else int(value)

    def flag(self, key: str) -> bool:
        """Whether the key is there and true; a flag without a value is."""
        return str(self.get(key)).lower() in ("true", "1", "yes", "on")

    def text(self, key: str) -> str | None:
        """A string; None where it is missing or only a shell knows it."""
        value = self.get(key)
        return None if value is None or UNKNOWN in str(value) else str(value)

    def copy(self, theirs: str, ours: str, *, whole: bool = False) -> None:
        """Take a number over under our name."""
        value = self.whole(theirs) if whole else self.number(theirs)
        if value is not None:
            self._out.put(ours, value, theirs)

    def ignore(self, *keys: str) -> None:
        """Keys that other keys decided already."""
        self._read.update(keys)

    def name_the_rest(self, reasons: dict[str, str]) -> None:
        """One line for each key that was not read. `reasons`: beginning of a key → why it has no counterpart."""
        for key in self._flat:
            if key not in self._read:
                why = next((why for begin, why in reasons.items() if key.startswith(begin)), _NEVER)
                self._out.drop(key, why)


def put_model(out: Imported, source: Source, key: str, given: str | None) -> None:
    """The model: a folder that `given` names, else one of theirs that exists here."""
    theirs = source.text(key)
    if given is not None:
        out.put("model.path", given, "--model-path")
    elif theirs and os.path.isfile(os.path.join(theirs, "config.json")):
        out.put("model.path", theirs, key)
    elif source.has(key):
        shown = f"'{theirs[:80]}'" if theirs else "a value that only its shell knows"
        out.drop(key, f"{shown} is no model folder here; name one with --model-path")


def put_pools(out: Imported, *, training: int | None, rollout: int | None, shared: bool, size: int, keys: str) -> None:
    """Training GPUs and rollout GPUs. `shared`: rollout runs on the training GPUs in turn and has none of its own."""
    out.put("cluster.gpus_per_worker", size, keys)
    out.put("cluster.max_preemptible_gpus", 0, f"{out.framework} has no preemptible GPUs")
    if training:
        out.put("cluster.training_gpus", training, keys)
    if shared:
        out.put("cluster.borrowing", "gated", keys)
        out.put("cluster.reserved_rollout_gpus", size, "one rollout worker of its own: PEARL lends training GPUs to it")
        out.drop(
            "(shared GPUs)", f"rollout has no GPUs of its own there; PEARL needs one worker, {size} GPUs, beside them"
        )
    elif rollout:
        out.put("cluster.reserved_rollout_gpus", rollout - rollout % size, keys)
        if rollout % size:
            out.drop("(rollout GPUs)", f"{rollout} do not divide by {size} a worker; {rollout % size} are left out")


def put_batch(out: Imported, *, groups: int | None, group: int | None, updates: int | None, keys: str) -> None:
    """GRPO groups of a step and their size; `updates` optimizer updates a step."""
    if not groups or not group:
        return
    if group < 2:
        out.drop(keys, f"groups of {group}: GRPO compares at least 2 trajectories of a task; 2 are used")
        group = 2
    out.put("train.groups_per_step", groups, keys)
    out.put("train.group_size", group, keys)
    out.put("rollout.batch_size", groups * group, keys)
    if updates:
        out.put("train.minibatches", max(1, updates), keys)


def put_lengths(out: Imported, *, context: int | None, response: int | None, keys: str) -> None:
    """Longest context, and longest response of a turn (which must leave room for a prompt)."""
    if context:
        out.put("model.max_context_tokens", context, keys)
        out.put("engine.kv_tokens", max(32_768, context), "at least one trajectory")
    if response and context:
        if response >= context:
            out.drop(keys, f"responses of {response} tokens leave no room in {context}; {context // 2} are used")
            response = context // 2
        out.put("rollout.max_new_tokens", response, keys)
