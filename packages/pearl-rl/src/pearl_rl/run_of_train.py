"""Whether a folder holds a run of `pearl-rl train`, for the commands that need one."""

from pathlib import Path

from pearl_rl.errors import CommandError
from pearl_rl.run_folder import CONFIG_TOML, SCENARIO_JSON


def require_run(path: Path) -> Path:
    """The settings file of the run of `pearl-rl train` in `path`. Raises `CommandError` that says what `path` is."""
    config = path / CONFIG_TOML
    if config.is_file():
        return config
    if not path.exists():
        raise CommandError(f"{path}: does not exist; give the folder of a run of `pearl-rl train`")
    if (path / SCENARIO_JSON).is_file():
        raise CommandError(
            f"{path}: is a recorded simulation, and this needs a run of `pearl-rl train`; "
            "`pearl-rl status`, `report` and `timeline` read both"
        )
    raise CommandError(f"{path}: holds no {CONFIG_TOML}; give the folder of a run of `pearl-rl train`")
