"""On which line of a TOML document each key stands, so that an error can point there. `tomllib` does not say."""

import re
from collections.abc import Iterator

_KEY_PART = re.compile(r'\s*(?:([A-Za-z0-9_-]+)|"((?:[^"\\]|\\.)*)"|\'([^\']*)\')\s*')
_OPENING, _CLOSING = "[{", "]}"


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Map each dotted key and each table header to its line, from 1. `text` must be valid TOML.

    Keys inside an inline table carry the line of the key that holds the table, by lookup of their prefix.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, statement in _statements(text):
        if statement.startswith("["):
            table = _key(statement.lstrip("["))
            lines.setdefault(table, number)
        else:
            lines.setdefault(table + _key(statement), number)
    return lines


def line_of(lines: dict[tuple[str, ...], int], key: tuple[str, ...]) -> int | None:
    """The line of `key`, or of the nearest part of it that has one."""
    while key:
        if key in lines:
            return lines[key]
        key = key[:-1]
    return None


def _key(text: str) -> tuple[str, ...]:
    """The parts of the dotted key that `text` begins with."""
    parts: list[str] = []
    position = 0
    while match := _KEY_PART.match(text, position):
        parts.append(next(group for group in match.groups() if group is not None))
        position = match.end()
        if text[position : position + 1] != ".":
            break
        position += 1
    return tuple(parts)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The first line of each statement, with its number: skips comments, blank lines and continuation lines."""
    number, position = 1, 0
    while position < len(text):
        end = _statement_end(text, position)
        statement = text[position:end]
        first = statement.strip()
        if first and not first.startswith("#"):
            skipped = statement[: len(statement) - len(statement.lstrip())].count("\n")
            yield number + skipped, first
        number += statement.count("\n") + 1
        position = end + 1


def _statement_end(text: str, position: int) -> int:
    """Position of the line end that ends the statement at `position` (strings and brackets may span lines)."""
    depth = 0
    while position < len(text):
        character = text[position]
        if character == "\n" and depth == 0:
            return position
        if character == "#":
            position = _find(text, "\n", position)
            continue
        if character in "\"'":
            position = _string_end(text, position)
            continue
        depth += (character in _OPENING) - (character in _CLOSING)
        position += 1
    return position


def _string_end(text: str, start: int) -> int:
    """Position after the string that opens at `start`."""
    quote = text[start]
    mark = quote * 3 if text.startswith(quote * 3, start) else quote
    position = start + len(mark)
    while position < len(text):
        if text[position] == "\\" and quote == '"':
            position += 2
        elif text.startswith(mark, position):
            position += len(mark)
            while len(mark) == 3 and text[position : position + 1] == quote:
                position += 1
            return position
        else:
            position += 1
    return position


def _find(text: str, what: str, start: int) -> int:
    """Position of `what` from `start` on, or the end."""
    found = text.find(what, start)
    return len(text) if found < 0 else found
