"""Building the tiny model from a process that never imports torch."""

import asyncio
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pearl_executor.runtimes.local.channels import CallTimeoutError, ChannelError
from pearl_executor.runtimes.local.processes import ProcessError, ProcessServer
from pearl_rl.training.rank_group import TrainerError
from pearl_rl.training.tiny_model import TinyShape, WarmUp


async def build_in_child(
    forks: ProcessServer,
    folder: Path,
    shape: TinyShape,
    seed: int,
    warm_up: WarmUp | None = None,
    *,
    timeout_s: float = 300.0,
) -> int:
    """`tiny_model.build_tiny_model` in a process of its own. Returns the parameters. Raises `TrainerError`."""
    try:
        name = f"build-{secrets.token_hex(4)}"
        child = await forks.spawn(name, "pearl_rl.training.rank:build_main", {"threads": 1})
    except ProcessError as error:
        raise TrainerError(f"cannot build the model: {error}") from error
    head = {"folder": str(folder), "shape": asdict(shape), "seed": seed, "warm_up": _plain(warm_up)}
    try:
        answer = await child.channel.call("build", head, timeout_s=timeout_s)
    except CallTimeoutError as error:
        raise TrainerError(
            f"the model was not built in {folder} within {timeout_s:g} s; this machine is too busy, try again later"
        ) from error
    except ChannelError as error:
        raise TrainerError(f"cannot build the model in {folder}: {error}") from error
    finally:
        await asyncio.shield(forks.kill(child))
        child.channel.close()
    parameters: int = answer.head["parameters"]
    return parameters


def _plain(warm_up: WarmUp | None) -> dict[str, Any] | None:
    if warm_up is None:
        return None
    examples = [(example.tokens, [int(learned) for learned in example.mask]) for example in warm_up.examples]
    return {
        "examples": examples,
        "steps": warm_up.steps,
        "batch": warm_up.batch,
        "learning_rate": warm_up.learning_rate,
        "observation_weight": warm_up.observation_weight,
    }
