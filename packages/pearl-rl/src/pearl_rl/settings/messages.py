"""The words for what is wrong with a value."""

from collections.abc import Mapping
from typing import Any

from pearl_rl.settings.keys import FREE_FORM

_LONGEST = 60

_RULES: Mapping[str, str] = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string, in quotes",
    "string_too_short": "must not be empty",
    "literal_error": "must be {expected}",
}


_NUMERIC = frozenset({"int_type", "float_type"})


def rule(path: tuple[str, ...], detail: Mapping[str, Any]) -> str:
    """The rule that pydantic's error `detail` for the value at `path` states, in the project's words."""
    if path[:-1] == FREE_FORM:
        return "must be true, false, a finite number, a string, or a list of these"
    template = _RULES.get(detail["type"])
    if template is None:
        return str(detail["msg"])
    text = template.format_map(detail.get("ctx", {}))
    # A number in quotes looks like one in a message.
    return f"{text}, not text" if detail["type"] in _NUMERIC and isinstance(detail.get("input"), str) else text


def short(value: object) -> str:
    """A value as text on one line, cut where it is long."""
    if isinstance(value, str):
        text = value if value.isprintable() else repr(value)
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        try:
            text = repr(value)
        except ValueError:  # An integer with more digits than Python prints.
            text = "a number of very many digits"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
