"""What the variables and arrays of a shell script hold, as far as that is known without running it."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pearl_rl.importing.shell_words import Word, closing, pieces

UNKNOWN: Final = "\0unknown"
"""Stands in a value for what only a shell would know."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"([A-Za-z_]\w*)(?:(:?)([-=+?])(.*))?", re.DOTALL)
_SPREAD = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_ARITHMETIC: Final = re.compile(r"[\d\s()*/%+-]*", re.ASCII)
"""All that whole-number arithmetic is written with; Python warns of what merely looks like a number."""
_REST: Final = frozenset({"$@", "$*", "${@}", "${*}"})
_OPERATORS: Final[Mapping[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST: Final = 10**15
_LONGEST_VALUE: Final = 65_536
_MOST_WORDS: Final = 10_000
_DEEPEST: Final = 20
_GLUE: Final = "\1"
"""Before a blank that was quoted, so that a word is not split there."""


class Values:
    """Variables and arrays; `set` and `extend` while a script is read, `words` and `value` to expand."""

    def __init__(self) -> None:
        self._variables: dict[str, str] = {}
        self._arrays: dict[str, list[str]] = {}

    def set(self, name: str, value: str, *, append: bool = False, perhaps: bool = False) -> None:
        """Assign a variable. `perhaps`: whether the assignment runs is not known; another value is unknown then."""
        before = self._variables.get(name)
        if append:
            value = (before or "") + value
        known = len(value) <= _LONGEST_VALUE and not (perhaps and value != before)
        self._variables[name] = value if known else UNKNOWN

    def extend(self, name: str, words: Sequence[str], *, append: bool, perhaps: bool = False) -> None:
        """Assign an array, or add to it. Words that are added only perhaps keep their keys and lose their values."""
        if perhaps:
            words = [_perhaps(word) for word in words]
        kept = self._arrays.get(name, []) if append or perhaps else []
        self._arrays[name] = [*kept, *words][:_MOST_WORDS]

    def words(self, words: Sequence[Word]) -> list[str]:
        """Words as a command would be given them: arrays spread, expansions outside quotes split at blanks."""
        out: list[str] = []
        for word in words:
            only = word[0].text if len(word) == 1 and word[0].expands else ""
            spread = _SPREAD.fullmatch(only)
            if spread:
                out += self._arrays.get(spread[1], [])
            elif only in _REST:
                # What the script itself is given: nothing, where it is run as it stands.
                continue
            elif any(piece.splits and "$" in piece.text for piece in word):
                out += self._split(word)
            else:
                out.append(self.value(word))
        return out

    def value(self, word: Word) -> str:
        """A word as one value."""
        return self._joined(word, 0)

    def _joined(self, word: Word, depth: int) -> str:
        return "".join(self._expand(piece.text, depth) if piece.expands else piece.text for piece in word)

    def _split(self, word: Word) -> list[str]:
        glued = ""
        for piece in word:
            text = self._expand(piece.text, 0) if piece.expands else piece.text
            glued += text if piece.splits else re.sub(r"(?=\s)", _GLUE, text)
        return [part.replace(_GLUE, "") for part in re.split(rf"(?<!{_GLUE})\s+", glued) if part]

    def _expand(self, text: str, depth: int) -> str:
        out, at = "", 0
        while at < len(text):
            dollar = text.find("$", at)
            if dollar < 0:
                break
            value, end = self._dollar(text, dollar, depth)
            out += text[at:dollar] + value
            at = end
        return out + text[at:]

    def _dollar(self, text: str, at: int, depth: int) -> tuple[str, int]:
        """The value of what begins with `$` at `at`, and where it ends."""
        if depth > _DEEPEST:
            return UNKNOWN, len(text)
        if text.startswith(("$(", "${"), at):
            end = closing(text, at + 1)
            inner = text[at + 2 : end]
            if text.startswith("$((", at):
                return self._arithmetic(inner[1:].removesuffix(")"), depth), end + 1
            return (self._parameter(inner, depth) if text[at + 1] == "{" else UNKNOWN), end + 1
        name = _NAME.match(text, at + 1)
        if name is None:
            return ("$", at + 1) if at + 1 == len(text) else (UNKNOWN, at + 2)
        return self._variable(name[0]), name.end()

    def _variable(self, name: str) -> str:
        array = self._arrays.get(name)
        return self._variables.get(name, UNKNOWN if array is None else (array or [""])[0])

    def _parameter(self, text: str, depth: int) -> str:
        found = _PARAMETER.fullmatch(text)
        if found is None:
            return UNKNOWN
        name, colon, kind, word = found.groups()
        known = self._variables.get(name)
        if kind is None or kind == "?":
            return self._variable(name)
        absent = known is None or (bool(colon) and known == "")
        if absent == (kind == "+"):
            return known or ""
        default = self._joined(pieces(word), depth + 1)
        if kind == "=":
            self.set(name, default)
        return default

    def _arithmetic(self, text: str, depth: int) -> str:
        text = re.sub(r"\$\{[^}]*\}", lambda found: self._expand(found[0], depth + 1), text)
        bare = re.sub(r"\$?\b([A-Za-z_]\w*)", lambda found: self._variables.get(found[1], "unknown"), text)
        if _ARITHMETIC.fullmatch(bare) is None:
            return UNKNOWN
        try:
            return str(_whole(ast.parse(bare.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return UNKNOWN


def _whole(node: ast.expr) -> int:
    """The value of whole-number arithmetic. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < _LARGEST:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_whole(node.left), _whole(node.right))
        if abs(value) < _LARGEST:
            return value
    raise ValueError("no whole-number arithmetic")


def _perhaps(word: str) -> str:
    key, equals, _ = word.partition("=")
    if equals:
        return f"{key}={UNKNOWN}"
    return word if word.startswith("-") else UNKNOWN
