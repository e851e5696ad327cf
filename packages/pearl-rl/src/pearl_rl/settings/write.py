"""Resolved settings as TOML and JSON, each value with its origin; and the JSON schema of a configuration file."""

import json
from collections.abc import Iterable
from typing import Any

from pearl_rl.settings.keys import FREE_FORM, sections
from pearl_rl.settings.load import ResolvedSettings, load_settings
from pearl_rl.settings.root import Settings

_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def to_toml(resolved: ResolvedSettings, *, origins: bool = True) -> str:
    """A configuration file that gives exactly `resolved.settings` again; each line says where its value came from."""
    blocks = []
    values = resolved.settings.model_dump()
    for path in (*sections(), FREE_FORM):
        table = _at(values, path)
        lines = [f"[{_dotted(path)}]"] if path else []
        for key, value in table.items():
            if (*path, key) in sections() or (*path, key) == FREE_FORM:
                continue
            origin = resolved.origins.get((*path, key), "")
            note = f"  # {_comment(origin)}" if origins and origin else ""
            lines.append(f"{_key(key)} = {toml_value(value)}{note}")
        if path:
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def to_json(resolved: ResolvedSettings) -> dict[str, Any]:
    """`settings` as nested objects, and `origins` by dotted key."""
    return {
        "settings": resolved.settings.model_dump(mode="json"),
        "origins": {".".join(path): origin for path, origin in sorted(resolved.origins.items())},
    }


def json_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, with the default job's values. No key is required."""
    schema = Settings.model_json_schema()
    defaults = load_settings().settings.model_dump(mode="json")
    by_class = {section.__name__: _at(defaults, path) for path, section in sections().items() if path}
    schema.pop("required", None)
    for name, definition in schema.get("$defs", {}).items():
        definition.pop("required", None)
        for key, field in definition["properties"].items():
            if "$ref" not in field:
                field["default"] = by_class[name][key]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


def toml_value(value: object) -> str:
    """One value in TOML syntax: booleans, finite numbers, strings, and lists of these."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _at(values: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    """The table at `path`."""
    for part in path:
        values = values[part]
    return values


def _dotted(path: Iterable[str]) -> str:
    return ".".join(_key(part) for part in path)


def _key(key: str) -> str:
    return key if key and set(key) <= _BARE else toml_value(key)


def _comment(text: str) -> str:
    """Text that may stand in a comment: no control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
