"""Models and GPUs by name, and the bundled profiles: data files shipped with the package."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pearl_state.errors import StateError


class CatalogError(StateError, ValueError):
    """A name that the catalog does not have, or a combination that no worker can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of a model and what follows from it by arithmetic."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    """Routed experts of a mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int = 0
    moe_intermediate: int = 0
    moe_layers: int = 0
    max_position: int = 0
    bytes_per_weight: float = 2.0
    params_total: float
    params_active: float
    """Parameters that one token uses."""
    flops_per_token: float
    """All active matrix products of one token, output head included, attention scores excluded."""
    attention_flops_per_context_token: float
    """To be multiplied by the context of a token."""
    attention_context_limit: int = 0
    """Context tokens attended at most; 0 means all."""
    kv_bytes_per_token: float
    """Over all layers, bytes."""
    shared_latent_kv: bool = False
    """Whether every tensor-parallel rank holds the whole KV (latent attention)."""
    source: str = ""

    @property
    def weight_bytes(self) -> float:
        """All weights, bytes."""
        return self.params_total * self.bytes_per_weight

    @property
    def embedding_bytes(self) -> float:
        """The input embedding, of which a token reads one row, bytes."""
        return self.vocab * self.hidden * self.bytes_per_weight

    @property
    def expert_bytes(self) -> float:
        """All routed experts of all layers (three matrices each), bytes; 0 for a dense model."""
        return 3.0 * self.moe_layers * self.experts * self.hidden * self.moe_intermediate * self.bytes_per_weight

    @property
    def head_flops(self) -> float:
        """The output head, needed for one token of a prompt only, FLOP."""
        return 2.0 * self.vocab * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Peak figures of one GPU."""

    name: str
    bf16_tflops: float
    """Dense, 1e12 FLOP/s."""
    fp8_tflops: float | None = None
    hbm_gib: float
    """2**30 bytes."""
    hbm_gbps: float
    """1e9 bytes/s."""
    nvlink_gbps: float
    """One direction, 1e9 bytes/s."""
    nic_gbps: float
    """One direction, 1e9 bytes/s."""
    pcie_gbps: float
    aliases: tuple[str, ...] = ()
    source: str = ""
    note: str = ""

    @property
    def hbm_bytes(self) -> float:
        """Device memory, bytes."""
        return self.hbm_gib * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledProfile:
    """A named profile for one model on one kind of worker; each value says where it comes from."""

    name: str
    about: str
    model: str
    gpu: str
    tensor_parallel: int
    workload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of a `WorkloadProfile`, `origin` included."""
    platform: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of a `PlatformProfile`, `origin` included."""


PROFILES = ("swe-32k",)
"""Names of the bundled profiles."""


@cache
def models() -> Mapping[str, ModelSpec]:
    """All models of the catalog, by name."""
    entries = _load("models.json")["models"]
    return {name: ModelSpec(name=name, **entry) for name, entry in entries.items()}


@cache
def gpus() -> Mapping[str, GpuSpec]:
    """All GPUs of the catalog, by name."""
    entries = _load("gpus.json")["gpus"]
    return {
        name: GpuSpec(name=name, **{**entry, "aliases": tuple(entry["aliases"])}) for name, entry in entries.items()
    }


def find_model(name: str) -> ModelSpec:
    """The model called `name`, in any case; an organisation before a slash is ignored. Raises `CatalogError`."""
    known = {key.lower(): spec for key, spec in models().items()}
    spec = known.get(name.strip().rsplit("/", 1)[-1].lower())
    if spec is None:
        raise CatalogError(_unknown("model", name, models()))
    return spec


def find_gpu(name: str) -> GpuSpec:
    """The GPU called `name` or aliased so, in any case. Raises `CatalogError`."""
    known = {key.lower(): spec for key, spec in gpus().items()}
    known.update((alias, spec) for spec in gpus().values() for alias in spec.aliases)
    spec = known.get(name.strip().lower())
    if spec is None:
        raise CatalogError(_unknown("GPU", name, known))
    return spec


def find_profile(name: str) -> BundledProfile:
    """The bundled profile called `name`. Raises `CatalogError`."""
    if name.strip().lower() not in PROFILES:
        raise CatalogError(_unknown("profile", name, PROFILES))
    entry = _load(f"{name.strip().lower()}.json")
    return BundledProfile(
        name=entry["name"],
        about=entry["about"],
        model=entry["model"],
        gpu=entry["gpu"],
        tensor_parallel=entry["tensor_parallel"],
        workload=_values(entry["workload"], entry["name"]),
        platform=_values(entry["platform"], entry["name"]),
    )


def _values(entries: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    values: dict[str, Any] = {key: item["value"] for key, item in entries.items()}
    values["origin"] = {key: f"bundled {name}: {item['origin']}" for key, item in entries.items()}
    return values


def _load(file: str) -> Any:
    # Imported where used: it costs more than the rest of the package at import.
    from importlib.resources import files

    return json.loads((files("pearl_planner") / "data" / file).read_text(encoding="utf-8"))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    by_lower = {key.lower(): key for key in known}
    near = get_close_matches(name.strip().lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean '{by_lower[near[0]]}'?" if near else "known are " + ", ".join(sorted(by_lower.values()))
    return f"no {what} '{name}' in the catalog: {hint}"
