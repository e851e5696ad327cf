"""Launch scripts as data: the arguments of the training command, without running anything.

Understood are assignments, arrays, `${NAME:-default}`, whole-number arithmetic, and line continuations. Whatever
needs a shell to know (command substitution, loops) becomes `UNKNOWN` and is reported, never guessed.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Final

UNKNOWN: Final = "\0unknown"
"""Stands in an argument for a value that only a shell would know."""

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=\(")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPREAD = re.compile(r"^\$\{([A-Za-z_]\w*)\[[@*]\]\}$")
_REST: Final = frozenset({"$@", "$*", "${@}", "${*}"})
_OPERATORS: Final[Mapping[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_DEEPEST: Final = 20


def command_arguments(text: str, entry: re.Pattern[str]) -> list[str]:
    """The words after the first word that `entry` matches, in the last command that has one; arrays spread.

    An empty list where no command does.
    """
    reader = _Reader()
    found: list[str] = []
    for line in logical_lines(text):
        words = reader.line(line)
        for index, word in enumerate(words):
            if entry.search(word):
                found = words[index + 1 :]
                break
    return found


def logical_lines(text: str) -> list[str]:
    """Lines without comments, continued ones and arrays joined."""
    lines: list[str] = []
    pending = ""
    for raw in text.splitlines():
        line = _without_comment(raw).rstrip()
        pending = (pending + " " + line.removesuffix("\\")).strip()
        array = _ARRAY.match(pending)
        if array and _closing(pending, array.end() - 1, "()") == len(pending):
            continue
        if not line.endswith("\\"):
            lines.append(pending)
            pending = ""
    return [line for line in (*lines, pending) if line]


def _without_comment(line: str) -> str:
    """The line up to a `#` that begins a word outside quotes."""
    quote = ""
    for index, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


class _Reader:
    """Variables and arrays as far as they are known."""

    def __init__(self) -> None:
        self._variables: dict[str, str] = {}
        self._arrays: dict[str, list[str]] = {}

    def line(self, line: str) -> list[str]:
        """Take an assignment in, or return the command's words."""
        line = _join_arithmetic(line)
        array = _ARRAY.match(line)
        if array:
            body = line[array.end() :].rstrip().removesuffix(")")
            self._arrays[array[1]] = self._words(body)
            return []
        words = self._words(line)
        assignment = _ASSIGNMENT.fullmatch(line)
        if assignment and len(_split(line)) == (2 if line.startswith(("export ", "local ", "readonly ")) else 1):
            value = words[-1].split("=", 1)
            self._variables[assignment[1]] = value[1] if len(value) == 2 else ""
            return []
        return words

    def _words(self, text: str) -> list[str]:
        words: list[str] = []
        for word in _split(text):
            if word in _REST:
                # What the script itself is given: nothing, where it is run as it stands.
                continue
            spread = _SPREAD.match(word)
            if spread:
                words += self._arrays.get(spread[1], [])
            else:
                words.append(self._expand(word))
        return words

    def _expand(self, word: str, depth: int = 0) -> str:
        out, at = "", 0
        while at < len(word):
            if word[at] != "$":
                # A backquote runs a command.
                out += UNKNOWN if word[at] == "`" else word[at]
                at += 1
                continue
            value, at = self._dollar(word, at, depth)
            out += value
        return out

    def _dollar(self, word: str, at: int, depth: int) -> tuple[str, int]:
        """The value of what begins with `$` at `at`, and where it ends."""
        if depth > _DEEPEST:
            return UNKNOWN, len(word)
        if word.startswith("$((", at):
            end = _closing(word, at + 2, "()")
            return self._arithmetic(word[at + 3 : end]), end + 2
        if word.startswith("$(", at):
            return UNKNOWN, len(word)
        if word.startswith("${", at):
            end = _closing(word, at + 1, "{}")
            return self._parameter(word[at + 2 : end], depth), end + 1
        name = _NAME.match(word, at + 1)
        if name is None:
            return ("$", at + 1) if at + 1 == len(word) else (UNKNOWN, at + 2)
        return self._variables.get(name[0], UNKNOWN), name.end()

    def _parameter(self, text: str, depth: int) -> str:
        name, dash, default = text.partition(":-")
        if not dash:
            name, dash, default = text.partition("-") if _NAME.match(text) else (text, "", "")
        known = self._variables.get(name)
        if known is not None and not (dash and known == ""):
            return known
        return self._expand(default.strip("\"'"), depth + 1) if dash else UNKNOWN

    def _arithmetic(self, text: str) -> str:
        bare = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self._variables.get(m[1], "unknown"), text)
        try:
            return str(_whole(ast.parse(bare.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return UNKNOWN


def _whole(node: ast.expr) -> int:
    """The value of whole-number arithmetic. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**15:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_whole(node.left), _whole(node.right))
        if abs(value) < 10**15:
            return value
    raise ValueError("no whole-number arithmetic")


def _closing(text: str, at: int, pair: str) -> int:
    """Where the bracket that opens at `at` is closed; the end of the text where it is not."""
    depth = 0
    for index in range(at, len(text)):
        depth += (text[index] == pair[0]) - (text[index] == pair[1])
        if depth == 0:
            return index
    return len(text)


def _join_arithmetic(text: str) -> str:
    """`$((…))` without blanks, so that it stays one word."""
    out, at = "", 0
    while (begin := text.find("$((", at)) >= 0:
        end = _closing(text, begin + 1, "()")
        out += text[at:begin] + "".join(text[begin:end].split())
        at = end
    return out + text[at:]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        # An unbalanced quote: part of a construct that this reader does not know.
        return []
