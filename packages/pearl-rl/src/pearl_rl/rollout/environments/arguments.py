"""Arguments of environments: a frozen dataclass each, read from settings with errors that name the nearest key."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from pearl_rl.rollout.environments.protocol import EnvironmentSettingsError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """` did you mean 'x'?` for a close name, else the list of what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there is {', '.join(names) or 'none'}"


def read_arguments(kind: type[T], owner: str, arguments: Mapping[str, Any]) -> T:
    """Build the dataclass `kind` of scalar fields from `arguments`. Raises `EnvironmentSettingsError`.

    A whole number is taken where a float is wanted; nothing else is converted.
    """
    hints = get_type_hints(kind)
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for key, value in arguments.items():
        if key not in known:
            raise EnvironmentSettingsError(f"{owner}: unknown argument {key!r}; {nearest(key, known)}")
        wanted = hints[key]
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        scalar = wanted in (int, float, bool, str)
        if scalar and (not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool)):
            raise EnvironmentSettingsError(f"{owner}: {key} = {value!r} must be of type {wanted.__name__}")
        values[key] = value
    return kind(**values)


def read_options(owner: str, options: Iterable[str]) -> dict[str, Any]:
    """Nested options from lines `dotted.key=value`; a value is JSON where it parses as such, else a string.

    Raises `EnvironmentSettingsError` for a line without `=`, or a key that is both a value and a table.
    """
    result: dict[str, Any] = {}
    for line in options:
        key, equals, text = line.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise EnvironmentSettingsError(f"{owner}: option {line!r} must be of the form key=value")
        table = result
        for name in names[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise EnvironmentSettingsError(f"{owner}: option {key!r} goes below one that has a value already")
        try:
            table[names[-1]] = json.loads(text)
        except ValueError:
            table[names[-1]] = text.strip()
    return result
