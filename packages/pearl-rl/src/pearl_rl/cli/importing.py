"""`pearl-rl import FRAMEWORK FILE`: another framework's configuration as settings of ours."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from pearl_rl.cli.report import write_text
from pearl_rl.errors import ExitCode, SettingsError
from pearl_rl.frameworks import NAMES
from pearl_rl.importing import areal, roll, slime, verl
from pearl_rl.importing.result import Imported, Scalar
from pearl_rl.importing.tree import Flat, read_text, read_yaml
from pearl_rl.settings import load_settings
from pearl_rl.settings.messages import short
from pearl_rl.settings.write import toml_value

_GPU_JOB: Final[Mapping[str, tuple[Scalar, str]]] = {
    "cluster.runtime": ("ray", "a job on GPUs"),
    "engine.device": ("cuda", "a job on GPUs"),
    "model.dtype": ("bfloat16", "a job on GPUs"),
    "device.paced": (False, "real devices need no pacing"),
    "availability.source": ("fixed", "no preemptible GPUs"),
    "planner.flip_s": (5.0, "PEARL section 4.4; measured ones take its place"),
    "planner.relaunch_s": (56.3, "PEARL Table 3; measured ones take its place"),
    "planner.new_worker_s": (67.3, "PEARL Table 3; measured ones take its place"),
    "planner.activation_s": (6.3, "PEARL Table 3; measured ones take its place"),
    "planner.deactivation_s": (3.2, "PEARL Table 3; measured ones take its place"),
    "run.wall_limit_s": (604_800.0, "a week"),
    "limits.executor.start_s": (600.0, "a large model"),
    "limits.executor.load_s": (300.0, "a large model"),
    "limits.executor.sync_s": (300.0, "a large model"),
    "limits.rollout.no_worker_s": (1_800.0, "calls wait while workers start or load"),
    "limits.rollout.batch_s": (14_400.0, "long trajectories"),
    "limits.rollout.environment_s": (1_800.0, "slow tools"),
    "limits.training.start_s": (1_800.0, "a large model"),
    "limits.training.update_s": (3_600.0, "a large model"),
    "limits.training.checkpoint_s": (1_800.0, "a large model"),
}
"""What the default job, which runs on a laptop, has otherwise."""


@dataclass(frozen=True, slots=True)
class _Reader:
    script: Callable[[str], Flat] | None
    """Of launch scripts; None where it is configured by YAML alone."""
    rolls_out: Callable[[Flat], bool]
    mapping: Callable[[Flat, str | None], Imported]
    job: str
    """Keys that a job with rollout has."""


_READERS: Final[Mapping[str, _Reader]] = {
    "verl": _Reader(verl.overrides, verl.rolls_out, verl.read, "actor_rollout_ref.*"),
    "slime": _Reader(slime.flags, slime.rolls_out, slime.read, "--rollout-* without --loss-type sft_loss"),
    "roll": _Reader(None, roll.rolls_out, roll.read, "actor_train.*, actor_infer.*"),
    "areal": _Reader(None, areal.rolls_out, areal.read, "rollout.*, gconfig.*"),
}


def read_configuration(framework: str, path: Path, model_path: str | None) -> Imported:
    """Read a launch script or YAML file. Raises `SettingsError` with one line."""
    if framework not in NAMES:
        raise SettingsError(f"import {framework[:40]}: unknown framework; known: {', '.join(NAMES)}")
    reader = _READERS[framework]
    text = read_text(path)
    if path.suffix in (".yaml", ".yml"):
        flat = read_yaml(text, path)
    elif reader.script is None:
        raise SettingsError(f"{path}: {NAMES[framework]} is configured by YAML; give the .yaml file that the job reads")
    else:
        flat = reader.script(text)
    if not flat and path.suffix in (".yaml", ".yml"):
        raise SettingsError(f"{path}: holds no key")
    if not flat:
        what = f"holds no command that starts reinforcement learning with {NAMES[framework]}, with arguments"
        raise SettingsError(f"{path}: {what}")
    found = reader.mapping(flat, model_path)
    if not found.recognized:
        raise SettingsError(f"{path}: none of its {len(flat)} keys is one of {NAMES[framework]}")
    if not reader.rolls_out(flat):
        what = f"has no key of a job that rolls out with {NAMES[framework]} ({reader.job})"
        raise SettingsError(f"{path}: {what}; fine-tuning, generation and parts of a configuration cannot be imported")
    for key, (value, why) in _GPU_JOB.items():
        if key not in found.settings:
            found.put(key, value, why)
    return found


def to_toml(found: Imported, path: Path) -> str:
    """The settings as a configuration file; each line says which of their keys it came from."""
    tables: dict[str, list[str]] = {}
    for key, value in sorted(found.settings.items()):
        table, _, name = key.rpartition(".")
        origin = " ".join(found.origins[key].split())
        tables.setdefault(table, []).append(f"{name} = {toml_value(value)}  # {origin}")
    head = f"# From {found.framework}'s {short(path.name)}. Keys that are not here are the default job's.\n"
    return head + "".join(f"\n[{table}]\n" + "\n".join(lines) + "\n" for table, lines in tables.items())


def run_import(framework: str, path: Path, *, output: Path | None, model_path: str | None, as_json: bool) -> ExitCode:
    """Print or write the settings; one line on standard error for each key without a counterpart."""
    found = read_configuration(framework, path, model_path)
    overrides = [f"{key}={toml_value(value)}" for key, value in found.settings.items()]
    try:
        load_settings(None, overrides)
    except SettingsError as error:
        raise SettingsError(f"{path}: gives no valid settings: {str(error).removeprefix('--set: ')}") from None
    text = to_toml(found, path)
    if output is not None:
        write_text(output, text)
    if as_json:
        body = {"settings": found.settings, "origins": found.origins, "unsupported": found.unsupported}
        typer.echo(json.dumps(body, indent=1))
        return ExitCode.OK
    for line in found.unsupported:
        print(f"no counterpart: {line}", file=sys.stderr)
    if output is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{output}: {len(found.settings)} settings; {len(found.unsupported)} keys without a counterpart")
    return ExitCode.OK
