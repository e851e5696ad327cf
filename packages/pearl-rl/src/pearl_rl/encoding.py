"""Values of the vocabulary as JSON, and events back from it.

Dataclasses become objects, enums their text, configurations `2P3D`, sets sorted lists, and mappings objects with text
keys in the order of their keys. An event carries its name under `event`, so that `decode_event` gives it back.
"""

import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pearl_state import events as _events
from pearl_state.configuration import Configuration
from pearl_state.decision import Decision
from pearl_state.events import Event
from pearl_state.plan import TransitionPlan

T = TypeVar("T")

EVENT_TYPES: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(_events.Event)}
"""Every event by its name."""

_PLAIN = frozenset({type(None), bool, int, str})
_NOT_FINITE: Mapping[float, str] = {math.inf: "Infinity", -math.inf: "-Infinity"}


def encode(value: Any) -> Any:
    """A JSON-able form of any value of the vocabulary. Raises `TypeError` for what is none.

    JSON has no NaN and no infinities: these become the texts `NaN`, `Infinity`, `-Infinity`.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")
    if isinstance(value, Configuration):
        return str(value)
    if isinstance(value, Decision | TransitionPlan):
        return encode(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: encode(getattr(value, item.name)) for item in fields(value)}
    return _encode_collection(value)


def _encode_collection(value: Any) -> Any:
    """Mappings by sorted keys, sets sorted, sequences as they are."""
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(value[key]) for key in sorted(value, key=_order)}
    if isinstance(value, AbstractSet):
        return [encode(item) for item in sorted(value, key=_order)]
    if isinstance(value, Sequence):
        return [encode(item) for item in value]
    raise TypeError(f"no JSON for {type(value).__name__}")


def encode_event(event: Event) -> dict[str, Any]:
    """An event as an object, with its name under `event`."""
    return {"event": type(event).__name__, **encode(event)}


def decode_event(data: Mapping[str, Any]) -> Event:
    """The event that `encode_event` made `data` from. Raises `ValueError` for anything else."""
    kind = EVENT_TYPES.get(str(data.get("event")))
    if kind is None:
        raise ValueError(f"no event is called {data.get('event')!r}")
    event: Event = decode(kind, {key: value for key, value in data.items() if key != "event"})
    return event


def decode(kind: type[T], data: Any) -> T:
    """A value of type `kind` from what `encode` made of one. Raises `ValueError` for anything else."""
    try:
        value: T = _decode(kind, data)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{getattr(kind, '__name__', kind)}: {error}") from error
    return value


def json_line(value: Any) -> str:
    """One line of JSON, without a line end: readers of JSON Lines may split at it."""
    return json.dumps(encode(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _order(key: Any) -> tuple[str, Any]:
    """Sort numbers as numbers and text as text, also in one collection."""
    return ("", key) if isinstance(key, int | float) else ("t", str(key))


def _decode(kind: Any, data: Any) -> Any:
    """`data` as a value of type `kind`."""
    found: Callable[[Any], Any] = _decoder(kind)
    return found(data)


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """What makes values of type `kind`; put together once, since a journal holds millions of a few types."""
    kind = getattr(kind, "__supertype__", kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = _decoder(next(arg for arg in args if arg is not types.NoneType))
        return lambda data: data if data is None or type(data) in args else inner(data)
    if origin in (frozenset, list, tuple, Sequence):
        return _many(tuple if origin is Sequence else origin, args[0])
    if origin is not None and issubclass(origin, Mapping):
        of_key, of_value = _decoder(args[0]), _decoder(args[1])
        return lambda data: {of_key(key): of_value(value) for key, value in data.items()}
    if kind is Configuration:
        return Configuration.parse
    if is_dataclass(kind) and isinstance(kind, type):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, Enum | bool | int | float | str):
        return kind
    raise TypeError(f"cannot read a {kind}")


def _many(collection: Callable[[Iterable[Any]], Any], item: Any) -> Callable[[Any], Any]:
    item = getattr(item, "__supertype__", item)
    decoder = _decoder(item)
    plain = {item} if item in (int, float, str) else None

    def decode_many(data: Any) -> Any:
        # Of tokens and the like nothing is to be done.
        return collection(data if plain is not None and set(map(type, data)) == plain else map(decoder, data))

    return decode_many


def _record(kind: type[Any]) -> Callable[[Any], Any]:
    """For a dataclass; what its fields take is put together when the first one comes."""
    decoders: dict[str, Callable[[Any], Any]] = {}

    def decode_record(data: Any) -> Any:
        if not decoders:
            decoders.update({name: _decoder(hint) for name, hint in get_type_hints(kind).items()})
        return kind(**{name: decoders[name](value) for name, value in data.items()})

    return decode_record
