"""JSON of a guest's questions and samples, read strictly: an unknown key, a missing one or a wrong type is one line."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Final, TypeVar

from pearl_state.configuration import Configuration
from pearl_state.errors import StateError
from pearl_state.samples import DecodeSample, PrefillSample, TransferSample, TurnSample

T = TypeVar("T")

_LARGEST: Final = 1e300
"""Beyond any quantity; larger whole numbers do not even fit a float."""

Sample = DecodeSample | PrefillSample | TransferSample | TurnSample


class WireError(StateError, ValueError):
    """A message that is not what the question takes: says which key, which value, and what is expected."""


def shown(value: object) -> str:
    """The value as a message shows it: short, whatever was sent."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "a very large whole number"
    return str(value)[:60]


def take(message: object, allowed: Sequence[str], where: str) -> Mapping[str, Any]:
    """The message as an object with none but the `allowed` keys. Raises `WireError`."""
    if not isinstance(message, dict):
        raise WireError(f"{where}: expected a JSON object, got {type(message).__name__}")
    for key in message:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(allowed)}"
            raise WireError(f"{where}: unknown key '{str(key)[:60]}'; {hint}")
    return message


def number(message: Mapping[str, Any], key: str, default: float | None = None, *, least: float = 0.0) -> float:
    """A finite number of at least `least`. Raises `WireError`; without `default` also where the key is missing."""
    value = message.get(key, default)
    if value is None:
        raise WireError(f"'{key}' is missing: a number is required")
    if not isinstance(value, bool) and isinstance(value, int | float) and least <= value <= _LARGEST:
        return float(value)
    raise WireError(f"'{key}' = {shown(value)}: must be a finite number of at least {least:g}")


def count(message: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 0) -> int:
    """A whole number of at least `least`. Raises as `number`."""
    value = number(message, key, default, least=least)
    if value != int(value):
        raise WireError(f"'{key}' = {value}: must be a whole number")
    return int(value)


def flag(message: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    """True or false. Raises `WireError`."""
    value = message.get(key, default)
    if not isinstance(value, bool):
        raise WireError(f"'{key}' = {shown(value)}: must be true or false")
    return value


def text(message: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A string. Raises `WireError`."""
    value = message.get(key, default)
    if not isinstance(value, str):
        raise WireError(f"'{key}' = {shown(value)}: must be a string")
    return value


def configuration(value: object, key: str) -> Configuration | None:
    """`2P3D`, `4C`, or null. Raises `ConfigurationError` or `WireError`."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise WireError(f"'{key}' = {shown(value)}: must be like '2P3D' or '4C', or null")
    return Configuration.parse(value)


def listed(message: Mapping[str, Any], key: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    """A list, each item read by `read(item, where)`; empty where the key is missing."""
    value = message.get(key, [])
    if not isinstance(value, list):
        raise WireError(f"'{key}': must be a list")
    return tuple(read(item, f"{key}[{index}]") for index, item in enumerate(value))


def segment(item: object, where: str) -> tuple[Configuration, float]:
    """`["2P3D", 12.5]`: a configuration and the seconds for which it served."""
    if not isinstance(item, list) or len(item) != 2:
        raise WireError(f"{where}: expected [configuration, seconds]")
    chosen = configuration(item[0], where)
    if chosen is None:
        raise WireError(f"{where}: expected a configuration like '2P3D'")
    return chosen, number({"seconds": item[1]}, "seconds")


def turns(item: object, where: str) -> tuple[TurnSample, ...]:
    """One trajectory: a list of turns."""
    if not isinstance(item, list):
        raise WireError(f"{where}: a trajectory is a list of turns")
    return tuple(sample(TurnSample)(turn, f"{where}[{index}]") for index, turn in enumerate(item))


def sample(kind: type[T]) -> Callable[[object, str], T]:
    """A reader of one sample dataclass: its fields as keys; numbers finite and at least 0."""
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]

    def read(item: object, where: str) -> T:
        message = take(item, tuple(known), where)
        values: dict[str, Any] = {}
        for name, spec in known.items():
            if message.get(name) is None and spec.default is not MISSING:
                continue
            if spec.type is bool:
                values[name] = flag(message, name)
            elif spec.type in (int, int | None):
                values[name] = count(message, name)
            else:
                values[name] = number(message, name)
        return kind(**values)

    return read
