"""Configuration trees of other frameworks: flattened to dotted keys, references resolved."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from pearl_rl.errors import SettingsError

Flat = dict[str, Any]
"""Dotted key → value; lists of plain values stay lists."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_SELECTION = re.compile(r"\$\{oc\.(select|env):\s*([\w.]+)\s*(?:,\s*([^${},]*?)\s*)?\}")
_RANGE = re.compile(r"list\(range\((\d+)(?:\s*,\s*(\d+))?\)\)")
_LARGEST_FILE: Final = 4 * 1024 * 1024
_DEEPEST: Final = 30
_MOST_FOLLOWED: Final = 200
"""Keys that one value may lead to: no configuration has so many, and each may be a call within another."""
_MOST_KEYS: Final = 100_000
_LONGEST_VALUE: Final = 65_536
_MOST_DEVICES: Final = 1_000_000


def read_text(path: Path) -> str:
    """The file's text. Raises `SettingsError` for one that is missing, too large, or no text."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise SettingsError(f"{path}: is larger than {_LARGEST_FILE} bytes; a configuration is not")
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not UTF-8 text") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_yaml(text: str, path: Path) -> Flat:
    """Flatten a YAML mapping. Raises `SettingsError` where it is none."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise SettingsError(f"{path}: is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(tree, dict):
        raise SettingsError(f"{path}: holds no YAML mapping")
    flat: Flat = {}
    _flatten(tree, "", flat, 0)
    if len(flat) > _MOST_KEYS:
        raise SettingsError(f"{path}: comes to more than {_MOST_KEYS:,} keys; a configuration does not")
    return {key: resolve(flat, value) for key, value in flat.items()}


def _flatten(tree: Mapping[Any, Any], prefix: str, flat: Flat, depth: int) -> None:
    for key, value in tree.items():
        if len(flat) > _MOST_KEYS:
            return
        name = f"{prefix}{key}"
        if isinstance(value, dict) and depth < _DEEPEST:
            _flatten(value, f"{name}.", flat, depth + 1)
        else:
            flat[name] = value


def resolve(flat: Flat, value: Any, known: Flat | None = None) -> Any:
    """Follow `${a.b}`, and `${oc.select:a.b,x}` or else its `x`; what refers to nothing known, or to itself, stays as
    it is, and so does what would come to more than a value is long.

    Of `${oc.env:NAME,x}` only `x` is taken: the environment here is not the one of the job. `known` are keys that are
    resolved already.
    """
    if not isinstance(value, str) or "${" not in value:
        return value
    known = {} if known is None else known
    selection = _SELECTION.fullmatch(value)
    if selection:
        kind, name, other = selection.groups()
        if kind == "select" and flat.get(name) is not None:
            return _followed(flat, name, known)
        return value if other is None else None if other in ("null", "") else other
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _followed(flat, whole[1], known) if whole[1] in flat else value
    text = _REFERENCE.sub(lambda m: str(_followed(flat, m[1], known)) if m[1] in flat else m[0], value)
    return text if len(text) <= _LONGEST_VALUE else value


def _followed(flat: Flat, name: str, known: Flat) -> Any:
    """The value of key `name`; each is resolved once, however many others refer to it."""
    if name not in known:
        known[name] = flat[name]
        if len(known) < _MOST_FOLLOWED:
            known[name] = resolve(flat, flat[name], known)
    return known[name]


def devices(value: Any) -> list[int] | None:
    """GPU numbers of a device mapping: a list, or `list(range(a, b))` and sums of such; None for anything else."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    if not isinstance(value, str):
        return None
    numbers: list[int] = []
    for part in value.split("+"):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            return None
        first, last = (0, int(found[1])) if found[2] is None else (int(found[1]), int(found[2]))
        if last > _MOST_DEVICES or len(numbers) > _MOST_DEVICES:
            return None
        numbers += range(first, last)
    return numbers
