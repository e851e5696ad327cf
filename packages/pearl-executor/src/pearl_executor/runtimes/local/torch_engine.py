"""Builds the embedded torch engine inside a worker process. Importing this imports torch."""

from collections.abc import Mapping
from typing import Any

from pearl_executor.engines.torch.engine import Engine, EngineLimits, KvBlob
from pearl_executor.pacing import Pace
from pearl_executor.runtimes.local.hosting import Hosted
from pearl_state.roles import Role


def build(settings: Mapping[str, Any], role: Role) -> Hosted:
    """The engine that `hosting.torch_recipe` describes."""
    engine = Engine(
        settings["model_dir"],
        role=role,
        limits=EngineLimits(**settings["limits"]),
        pace=Pace(**settings["pace"]),
        device=settings["device"],
        threads=settings["threads"],
        seed=settings["seed"],
        weight_version=settings["weight_version"],
    )
    return Hosted(engine, KvBlob.from_bytes)
