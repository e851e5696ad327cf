"""From TOML and `--set` to settings, with the origin of every value. Reads files, writes none."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pearl_rl.errors import SettingsError
from pearl_rl.settings.keys import FREE_FORM, ONLY_IN_SCENARIOS, leaves, nearest, sections
from pearl_rl.settings.messages import rule, short
from pearl_rl.settings.root import Settings, contradictions
from pearl_rl.settings.toml_lines import key_lines, line_of

DEFAULT_ORIGIN = "default"
OVERRIDE_ORIGIN = "--set"
_ENVIRONMENT = ("environment", "name")
_TOML_OPENINGS = ("[", "{", '"', "'")

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings, and where each value came from."""

    settings: Settings
    origins: Mapping[KeyPath, str]
    """Path of each value → `default`, `FILE:LINE`, or `--set`."""


class _Layers:
    """Values laid over each other, each with its origin."""

    def __init__(self) -> None:
        self.values: dict[KeyPath, Any] = {}
        self.origins: dict[KeyPath, str] = {}

    def put(self, entries: Iterable[tuple[KeyPath, Any, str]]) -> None:
        """Lay one more layer on top: path, value, origin of each entry.

        A layer that names another environment drops the arguments that the layers below gave to theirs.
        """
        entries = list(entries)
        for path, value, _ in entries:
            if path == _ENVIRONMENT and value != self.values.get(path, value):
                for key in [k for k in self.values if k[:2] == FREE_FORM]:
                    del self.values[key], self.origins[key]
        for path, value, origin in entries:
            self.values[path] = value
            self.origins[path] = origin

    def describe(self, path: KeyPath) -> str:
        """`origin: key = value:`, the beginning of every complaint about a value."""
        return f"{self.origins[path]}: {'.'.join(path)} = {short(self.values[path])}:"

    def culprit(self, keys: Sequence[str]) -> str:
        """`describe` for the setting of `keys` that the uppermost layer holds."""
        paths = [tuple(key.split(".")) for key in keys]
        given = [path for path in paths if self.origins[path] == OVERRIDE_ORIGIN]
        given += [path for path in paths if self.origins[path] != DEFAULT_ORIGIN]
        return self.describe((given or paths)[0])

    def nested(self) -> dict[str, Any]:
        """The values as nested tables; every section is there, empty ones too."""
        tree: dict[str, Any] = {}
        for path in (*sections(), FREE_FORM):
            node = tree
            for part in path:
                node = node.setdefault(part, {})
        for path, value in self.values.items():
            node = tree
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = value
        return tree


def default_text() -> str:
    """The bundled configuration of the default job, as TOML."""
    return files("pearl_rl.settings").joinpath("default.toml").read_text(encoding="utf-8")


def load_settings(config: Path | None = None, overrides: Sequence[str] = ()) -> ResolvedSettings:
    """Lay `config` and the overrides (`a.b=value`) over the default job and check the whole.

    Raises `SettingsError` with one line that names the origin, the key, the value, the rule and the fix.
    """
    layers = _Layers()
    layers.put(_document(default_text(), None))
    if config is not None:
        layers.put(_document(_read(config), str(config)))
    given = [parse_override(text) for text in overrides]
    layers.put(entry for path, value in given for entry in _entries(path, value, lambda _: OVERRIDE_ORIGIN))
    settings = _validate(layers)
    broken = [f"{layers.culprit(found.keys)} {found.text}" for found in contradictions(settings)]
    if broken:
        raise SettingsError(_first(broken))
    return ResolvedSettings(settings, layers.origins)


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """Read `a.b=value`: the value in TOML syntax, or else a bare string. Raises `SettingsError`."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise SettingsError(f"--set {short(text)}: is not like section.key=value")
    value = value.strip()
    if not (key + value).isprintable():
        raise SettingsError(f"--set {short(key)}: holds unprintable characters")
    try:
        return path, tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError) as error:
        if value[:1] in _TOML_OPENINGS:
            raise SettingsError(f"--set {short(key)}={short(value)}: is not valid TOML: {error}") from None
        return path, value


def _read(config: Path) -> str:
    """The text of a configuration file."""
    try:
        # With or without the mark that some editors begin a file with.
        return config.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SettingsError(f"{config}: no such file; give a TOML file, or none for the default job") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{config}: is not UTF-8 text; give a TOML file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{config}: cannot be read ({reason}); give a TOML file") from None


def _document(text: str, name: str | None) -> Iterator[tuple[KeyPath, Any, str]]:
    """The entries of one TOML document; `name` is None for the default job."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise SettingsError(f"{name}: is nested too deeply; keys go three levels deep") from None
    except ValueError as error:
        raise SettingsError(f"{name}: is not valid TOML: {error}") from None
    lines = {} if name is None else key_lines(text)

    def origin(path: KeyPath) -> str:
        line = line_of(lines, path)
        return DEFAULT_ORIGIN if name is None else name if line is None else f"{name}:{line}"

    for key, value in document.items():
        yield from _entries((key,), value, origin)


def _entries(path: KeyPath, value: Any, origin: Callable[[KeyPath], str]) -> Iterator[tuple[KeyPath, Any, str]]:
    """Walk down to single settings. Raises `SettingsError` for a key that does not exist, or a section that is none."""
    if path in sections() or path == FREE_FORM:
        if not isinstance(value, dict):
            raise SettingsError(f"{origin(path)}: {'.'.join(path)} = {short(value)}: is a section; set its keys")
        for key, inner in value.items():
            yield from _entries((*path, key), inner, origin)
    elif path in leaves() or (path[:-1] == FREE_FORM):
        yield path, value, origin(path)
    else:
        other = (
            "; it is a setting of `pearl-rl simulate`, and this must be a job" if path[0] in ONLY_IN_SCENARIOS else ""
        )
        key = short(".".join(path))
        raise SettingsError(f"{origin(path)}: unknown key {key}; the nearest is {nearest(path)}{other}")


def _validate(layers: _Layers) -> Settings:
    """Check types and ranges."""
    try:
        return Settings.model_validate(layers.nested())
    except ValidationError as error:
        complaints: dict[KeyPath, str] = {}
        for detail in error.errors(include_url=False, include_context=True):
            path = tuple(str(part) for part in detail["loc"])
            while path not in layers.values:
                path = path[:-1]
            complaints.setdefault(path, f"{layers.describe(path)} {rule(path, detail)}")
        raise SettingsError(_first(list(complaints.values()))) from None


def _first(complaints: Sequence[str]) -> str:
    """One line: the first complaint, and how many more there are."""
    more = len(complaints) - 1
    return complaints[0] + (f" (and {more} more)" if more else "")
