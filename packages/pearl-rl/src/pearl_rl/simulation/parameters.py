"""Parameter sets: costs of a simulation that no kernel table has, by model, each value with its origin."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

from pearl_rl.errors import SettingsError
from pearl_rl.simulation.kernels import IterationOverheads
from pearl_rl.simulation.times import ReconfigurationTimes
from pearl_rl.simulation.training import TrainingTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParameters:
    """Sizes and scheduling of engines."""

    memory_fraction: float = 0.85
    """Part of a GPU's memory for weights and KV."""
    reserve_bytes: float = 4e9
    """Taken off that for activations and graphs, a GPU."""
    chunk_tokens: int = 8192
    max_running: int = 256
    reserve_tokens: int = 400
    mixed: bool = False
    phase_switch_s: float = 0.0
    """At each change between prefill and decode on a colocated worker (T_over of PEARL eq. (1)), seconds."""
    keeps_left_paths: bool = False
    """Whether a prefix cache holds what an edited history left until it must give way, as SGLang's does."""
    decode_prefix_cache: bool = True
    """Whether decode workers keep prefixes (SGLang: `--disaggregation-decode-enable-radix-cache`)."""
    attention_ranks: int = 1
    """Data-parallel attention ranks of one worker (see `data_parallel`)."""
    kv_store: bool = False
    """Whether workers share a storage of KV (see `kv_store`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParameters:
    """KV hand-over."""

    bytes_per_s_per_gpu: float = 4e10
    latency_s: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingParameters:
    """Who serves whose calls."""

    roll_binds: bool = False
    """Whether policies `roll` and `roll-large` bind each trajectory to a worker for good, as ROLL's own router does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """One set for one model."""

    times: ReconfigurationTimes
    training: TrainingTimes
    engine: EngineParameters
    links: LinkParameters
    routing: RoutingParameters = RoutingParameters()
    overheads: IterationOverheads
    workload: Mapping[str, float]
    """Scales of `WorkloadOptions` where a scenario sets none."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Dotted name → where the value comes from."""


_GROUPS: Mapping[str, type[Any]] = {
    "times": ReconfigurationTimes,
    "training": TrainingTimes,
    "engine": EngineParameters,
    "links": LinkParameters,
    "routing": RoutingParameters,
    "overheads": IterationOverheads,
}


def load_parameters(name: str, model: str, changed: Mapping[str, float | bool] | None = None) -> Parameters:
    """The set `name` for `model`: its defaults, what is particular to the model, and `changed` (dotted names) on top.

    A set may name another one as its `base`, whose values it takes where it has none of its own.
    Raises `SettingsError` for an unknown set or name.
    """
    sets = _document()
    if name not in sets or name == "about":
        known = ", ".join(key for key in sets if key != "about")
        raise SettingsError(f"parameters = {name}: no such parameter set; known are {known}")
    layers = [sets[name]]
    while "base" in layers[0]:
        layers.insert(0, sets[layers[0]["base"]])
    parts = [layer.get(part, {}) for layer in layers for part in ("default", model.lower())]
    entries = {key: entry for part in parts for key, entry in part.items()}
    values = {key: entry["value"] for key, entry in entries.items()}
    origin = {key: entry["origin"] for key, entry in entries.items()}
    for key, value in (changed or {}).items():
        values[key] = value
        origin[key] = "set by hand"
    groups: dict[str, dict[str, Any]] = {group: {} for group in (*_GROUPS, "workload")}
    for key, value in values.items():
        group, _, item = key.partition(".")
        if group not in groups or (group in _GROUPS and item not in {f.name for f in fields(_GROUPS[group])}):
            raise SettingsError(f"parameter {key}: no such parameter")
        groups[group][item] = value
    built = {group: kind(**groups[group]) for group, kind in _GROUPS.items()}
    return Parameters(**built, workload=groups["workload"], origin=origin)


@cache
def _document() -> Mapping[str, Any]:
    path = files("pearl_rl.simulation") / "data" / "parameters.json"
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
