"""A shell script cut into commands, and each word into pieces that remember how they were quoted. Nothing is run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
_HEREDOC = re.compile(r"<<(?!<)(-?)[ \t]*[\"'\\]?(\w+)[\"']?")
_ENDS: Final = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_PAIRS: Final = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a word."""

    text: str
    expands: bool
    """Whether `$` means something in it: not between single quotes, nor after a backslash."""
    splits: bool
    """Whether blanks in what it expands to begin new words: only outside quotes."""


Word = tuple[Piece, ...]


@dataclass(slots=True)
class Command:
    """One simple command, or an array's assignment."""

    words: list[Word] = field(default_factory=list[Word])
    array: str = ""
    """Name of the array that `words` are assigned to; empty for a command."""
    append: bool = False
    end: str = ""
    """What ended it: one of `;`, `&&`, `||`, `|`, `&`, `;;`, `(`, `)`, a new line; empty at the end of the text."""


def commands(text: str) -> list[Command]:
    """All commands of a script in their order. Total: what is cut off or unbalanced ends with the text."""
    return list(_Lexer(text.replace("\\\r\n", "\\\n")).commands())


def pieces(text: str) -> Word:
    """One word, blanks and all, like the default in `${NAME:-default}`."""
    return _Lexer(text).word("")


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._heredocs: list[tuple[bool, str]] = []

    def commands(self) -> Iterator[Command]:
        text = self._text
        command = Command()
        while self._at < len(text):
            self._skip_blanks()
            array = _ARRAY.match(text, self._at)
            if array:
                self._at = array.end()
                yield Command(self._array_words(), array[1], bool(array[2]), ";")
                continue
            command.end = self._end()
            if command.end:
                yield command
                command = Command()
            elif self._at < len(text):
                command.words.append(self.word(" \t\n;|&()"))
        if command.words:
            yield command

    def word(self, stops: str) -> Word:
        """Pieces up to one of `stops` outside quotes. Always takes at least one character."""
        out: list[Piece] = []
        bare, text, first = "", self._text, self._at
        while self._at < len(text) and (text[self._at] not in stops or self._is_redirection(first)):
            char = text[self._at]
            if char in "'\"\\":
                out += [Piece(bare, expands=True, splits=True)] if bare else []
                bare = ""
                out += self._quoted(char)
            elif char == "`":
                bare += "$()"
                self._at = self._after("`", self._at + 1)
            elif char == "$" and text[self._at + 1 : self._at + 2] in _PAIRS:
                bare += self._dollar()
            else:
                bare += char
                self._at += 1
        if bare or not out:
            out.append(Piece(bare, expands=True, splits=True))
        return tuple(out)

    def _quoted(self, char: str) -> list[Piece]:
        text, begin = self._text, self._at + 1
        if char == "\\":
            self._at = begin + 1
            taken = text[begin : begin + 1]
            return [] if taken in ("", "\n") else [Piece(taken, expands=False, splits=False)]
        if char == "'":
            self._at = self._after("'", begin)
            return [Piece(text[begin : self._at].removesuffix("'"), expands=False, splits=False)]
        self._at = begin
        out: list[Piece] = []
        inner = ""
        while self._at < len(text) and text[self._at] != '"':
            char = text[self._at]
            if char == "\\" and text[self._at + 1 : self._at + 2] in ("\\", '"', "$", "`", "\n"):
                out += [Piece(inner, expands=True, splits=False)] if inner else []
                escaped = text[self._at + 1]
                out += [] if escaped == "\n" else [Piece(escaped, expands=False, splits=False)]
                inner = ""
                self._at += 2
            elif char == "`":
                inner += "$()"
                self._at = self._after("`", self._at + 1)
            elif char == "$" and text[self._at + 1 : self._at + 2] in _PAIRS:
                inner += self._dollar()
            else:
                inner += char
                self._at += 1
        self._at += 1
        return [*out, Piece(inner, expands=True, splits=False)]

    def _dollar(self) -> str:
        """`${…}`, `$(…)` or `$((…))` as it stands."""
        begin = self._at
        self._at = min(len(self._text), closing(self._text, begin + 1) + 1)
        return self._text[begin : self._at]

    def _array_words(self) -> list[Word]:
        words: list[Word] = []
        while self._at < len(self._text):
            self._skip_blanks(lines=True)
            if self._text.startswith(")", self._at):
                self._at += 1
                break
            if self._at < len(self._text):
                words.append(self.word(" \t\n)"))
        return words

    def _skip_blanks(self, *, lines: bool = False) -> None:
        """To the next word: past blanks, continued lines and a comment."""
        text = self._text
        while self._at < len(text):
            heredoc = None if lines else _HEREDOC.match(text, self._at)
            if heredoc:
                self._heredocs.append((bool(heredoc[1]), heredoc[2]))
                self._at = heredoc.end()
            elif text[self._at] in " \t\r" or (lines and text[self._at] == "\n"):
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._at += 2
            elif text[self._at] == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            else:
                return

    def _end(self) -> str:
        """What ends a command here, taken; empty where a word begins."""
        text = self._text
        if text.startswith("&>", self._at):
            return ""
        if text.startswith("((", self._at):
            # Arithmetic as a command: only a shell knows.
            self._at = min(len(text), closing(text, self._at) + 1)
            return ";"
        found = next((end for end in _ENDS if text.startswith(end, self._at)), "")
        self._at += len(found)
        if found == "\n":
            self._skip_heredocs()
        return found

    def _skip_heredocs(self) -> None:
        for indented, mark in self._heredocs:
            blanks = r"\t*" if indented else ""
            pattern = re.compile(rf"^{blanks}{re.escape(mark)}$", re.MULTILINE)
            found = pattern.search(self._text, self._at)
            self._at = len(self._text) if found is None else min(len(self._text), found.end() + 1)
        self._heredocs.clear()

    def _is_redirection(self, first: int) -> bool:
        """Whether the `&` here is of `2>&1` or `&>`, and so part of the word."""
        text, at = self._text, self._at
        return text[at] == "&" and ((at > first and text[at - 1] in "<>") or text.startswith("&>", at))

    def _after(self, mark: str, at: int) -> int:
        found = self._text.find(mark, at)
        return len(self._text) if found < 0 else found + 1


def closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` is closed; the end of the text where it is not. Quotes are passed over."""
    opened, closed = text[at], _PAIRS[text[at]]
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char == "'" and opened == "(":
            found = text.find("'", at + 1)
            at = found if found > 0 else at
        depth += (char == opened) - (char == closed)
        if depth == 0:
            return at
        at += 1
    return len(text)
