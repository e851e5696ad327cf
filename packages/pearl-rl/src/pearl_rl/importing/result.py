"""What an import found, and the reader that the mappings of all frameworks share."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pearl_rl.frameworks import NAMES
from pearl_rl.importing.shell_values import UNKNOWN
from pearl_rl.importing.tree import Flat

Scalar = bool | int | float | str

_LARGEST: Final = 1e15
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
    recognized: int = 0
    """How many of their keys the mapping asked for; 0: the file is not of this framework."""

    def put(self, key: str, value: Scalar, origin: str) -> None:
        """Set one of ours."""
        self.settings[key] = value
        self.origins[key] = origin

    def drop(self, theirs: str, why: str) -> None:
        """Say why one of theirs is not taken over, in one line whatever their values hold."""
        words = " ".join(f"{theirs}: {why}".split())
        self.unsupported.append("".join(letter if letter.isprintable() else "?" for letter in words))


class Source:
    """Their keys; remembers which were read, so that the rest can be named.

    `defaults`: what the framework itself takes where a key is missing. Without them the default job's values would
    stand there, which are a laptop's.
    """

    def __init__(self, flat: Flat, out: Imported, defaults: Mapping[str, Scalar]) -> None:
        self._flat = flat
        self._out = out
        self._defaults = defaults
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._flat.get(key) is not None

    def get(self, key: str) -> Any:
        """The value as it is, or the framework's own; None where there is neither."""
        self.ignore(key)
        value = self._flat.get(key)
        return self._defaults.get(key) if value is None else value

    def origin(self, key: str) -> str:
        """What to say of where a value came from."""
        return key if self.has(key) else f"{key}: {NAMES[self._out.framework]}'s default"

    def number(self, key: str, ours: str = "it") -> float | None:
        """A number; None where it is missing or not one, which is then named. `ours`: what to set by hand instead."""
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
            self._out.drop(key, f"{shown} is not a number; set {ours} by hand")
            return None

    def whole(self, key: str, ours: str = "it") -> int | None:
        """A whole number; None as `number`, and for one that is none."""
        value = self.number(key, ours)
        if value is None:
            return None
        if not value.is_integer() or abs(value) > _LARGEST:
            self._out.drop(key, f"{value:g} is no whole number that PEARL can count to; set {ours} by hand")
            return None
        return int(value)

    def flag(self, key: str) -> bool:
        """Whether the key is true; a flag without a value is."""
        return str(self.get(key)).lower() in ("true", "1", "yes", "on")

    def text(self, key: str) -> str | None:
        """A string; None where it is missing or only a shell knows it."""
        value = self.get(key)
        return None if value is None or UNKNOWN in str(value) else str(value)

    def copy(
        self, theirs: str, ours: str, *, whole: bool = False, least: float = -math.inf, most: float = math.inf
    ) -> None:
        """Take a number over under our name. One outside of what ours may be becomes the nearest that it may."""
        value = self.whole(theirs, ours) if whole else self.number(theirs, ours)
        if value is None:
            return
        taken = min(max(value, least), most)
        if taken != value:
            taken = int(taken) if whole else taken
            self._out.drop(theirs, f"{value:g} is beyond what {ours} may be; {taken:g} is used")
        self._out.put(ours, taken, self.origin(theirs))

    def ignore(self, *keys: str) -> None:
        """Keys that other keys decided already."""
        self._out.recognized += sum(key in self._flat and key not in self._read for key in keys)
        self._read.update(keys)

    def name_the_rest(self, reasons: Mapping[str, str]) -> None:
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
    size = max(1, size)
    out.put("cluster.gpus_per_worker", size, keys)
    out.put("cluster.max_preemptible_gpus", 0, f"{NAMES[out.framework]} has no preemptible GPUs")
    if not training:
        training = size
        out.drop("(training GPUs)", f"how many is not said; {size} are taken, set cluster.training_gpus by hand")
    out.put("cluster.training_gpus", training, keys)
    if shared:
        lends = training % size == 0
        out.put("cluster.borrowing", "gated" if lends else "off", keys)
        out.put("cluster.reserved_rollout_gpus", size, "one rollout worker of its own: PEARL lends training GPUs to it")
        out.drop(
            "(shared GPUs)", f"rollout has no GPUs of its own there; PEARL needs one worker, {size} GPUs, beside them"
        )
        if not lends:
            out.drop("(training GPUs)", f"{training} do not divide by {size} a worker, so none are lent")
    elif rollout:
        out.put("cluster.reserved_rollout_gpus", max(size, rollout - rollout % size), keys)
        if rollout % size:
            rest = f"{rollout % size} are left out" if rollout > size else f"one worker of {size} is taken"
            out.drop("(rollout GPUs)", f"{rollout} do not divide by {size} a worker; {rest}")


def put_disaggregation(out: Imported, *, prefill: int, decode: int, rollout: int | None, size: int, keys: str) -> None:
    """Hold `prefill` and `decode` workers; where the job has room for that ratio several times, all of them."""
    groups = max(1, (rollout or 0) // max(1, size) // max(1, prefill + decode))
    out.put("planner.policy", "static_pd", keys)
    out.put("planner.configuration", f"{prefill * groups}P{decode * groups}D", keys)


def put_clip(source: Source, *, low: str, high: str) -> None:
    """How far the importance weight may go below and above 1."""
    source.copy(low, "train.clip_low", least=0, most=1)
    source.copy(high, "train.clip_high", least=0)


def put_aggregation(out: Imported, source: Source, key: str) -> None:
    """What weighs the same in the loss."""
    mode = source.text(key)
    ours = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}.get(mode or "")
    if ours:
        out.put("train.aggregation", ours, source.origin(key))
    elif mode is not None:
        out.drop(key, f"'{mode[:40]}' is not there; set train.aggregation to token_mean or sequence_mean")


def put_engine(out: Imported, source: Source, *, kind: str | None, memory: str, running: str, chunk: str) -> None:
    """What engines are told. `kind`: theirs by name; the others are keys, taken over where they are there."""
    if kind:
        out.drop(
            "(engine)",
            f"'{kind[:40]}' there; PEARL serves with its own engine, or with SGLang: set engine.kind and "
            "engine.sglang.interpreter",
        )
    fraction = source.number(memory, "engine.sglang.memory_fraction") if source.has(memory) else None
    if fraction is not None and 0 < fraction < 1:
        out.put("engine.sglang.memory_fraction", fraction, memory)
    elif fraction is not None:
        out.drop(memory, f"{fraction:g} is no part of a GPU; set engine.sglang.memory_fraction by hand")
    for theirs, ours in ((running, "engine.max_running"), (chunk, "engine.prefill_chunk_tokens")):
        value = source.whole(theirs, ours) if source.has(theirs) else None
        if value is not None and value > 0:
            out.put(ours, value, theirs)
        elif value is not None:
            out.drop(theirs, f"{value} is no bound there; PEARL has one, {ours}")


def put_estimator(out: Imported, source: Source, key: str) -> None:
    """Say so where advantages are not GRPO's."""
    estimator = source.text(key)
    if estimator not in (None, "grpo"):
        out.drop(key, f"'{str(estimator)[:40]}' is not there; PEARL trains with grpo")


def put_batch(out: Imported, *, groups: int | None, group: int | None, updates: int | None, keys: str) -> None:
    """GRPO groups of a step and their size; `updates` optimizer updates a step."""
    if not groups or not group:
        if groups or group:
            out.drop(keys, "not both are said; set train.groups_per_step and train.group_size by hand")
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
    elif response:
        out.drop(keys, "no longest context is said; set model.max_context_tokens and rollout.max_new_tokens by hand")
    if response and context:
        if response >= context:
            out.drop(keys, f"responses of {response} tokens leave no room in {context}; {context // 2} are used")
            response = context // 2
        out.put("rollout.max_new_tokens", response, keys)
