"""`pearl-rl config diff`: what two configurations, files or runs, have different."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.report.page import flat
from pearl_rl.run_folder import CONFIG_TOML
from pearl_rl.settings import load_settings


def diff(first: Path, second: Path | None, *, as_json: bool) -> ExitCode:
    """Print every key that differs; `second` is the default job where none is given. Raises `CommandError`."""
    before, after = (_resolved(first), _resolved(second)) if second else (_resolved(None), _resolved(first))
    names = (str(first), str(second)) if second else ("default job", str(first))
    keys = sorted(before.keys() | after.keys())
    changed = {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
    if as_json:
        pairs = {key: {"first": old, "second": new} for key, (old, new) in changed.items()}
        print(json.dumps({"first": names[0], "second": names[1], "changed": pairs}))
        return ExitCode.OK
    print(f"{names[0]} → {names[1]}")
    for key, (old, new) in changed.items():
        print(f"  {key}: {_text(old)} → {_text(new)}")
    if not changed:
        print("  no difference")
    return ExitCode.OK


def _resolved(path: Path | None) -> Mapping[str, Any]:
    """All settings by their dotted key. Raises `CommandError`."""
    if path is not None and path.is_dir():
        if not (path / CONFIG_TOML).is_file():
            raise CommandError(f"{path}: holds no {CONFIG_TOML}; give a TOML file or the folder of a run")
        path = path / CONFIG_TOML
    settings = load_settings(path).settings.model_dump(mode="json")
    return {key: value for key, value, _ in flat(settings, {})}


def _text(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)
