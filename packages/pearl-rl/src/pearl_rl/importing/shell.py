"""Launch scripts as data: the arguments of the training command, without running anything.

Understood are assignments, strings and arrays that grow, `${NAME:-default}`, whole-number arithmetic, and conditions on
known strings and numbers. Whatever needs a shell to know (command substitution, loops, a condition on either) becomes
`UNKNOWN` and is reported, never guessed; but for one thing: a device of which only the shell knows the kind is taken
for a GPU, since PEARL runs on nothing else that scripts ask about.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from pearl_rl.importing.shell_values import UNKNOWN, Values
from pearl_rl.importing.shell_words import Command, Word, commands

__all__ = ["UNKNOWN", "TrainingCommand", "training_command"]

Truth = bool | None
"""None: not known."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REDIRECTION = re.compile(r"(?:[\d&]?>{1,2}[|&]?|<)(.*)", re.DOTALL)
_DECLARES: Final = frozenset({"export", "local", "readonly", "declare", "typeset"})
_COMPARISONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_DEVICES: Final = {"gpu": True, "cuda": True, "npu": False, "ascend": False, "amd": False, "rocm": False}


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """The last command of a script that starts training."""

    entry: str
    """Its word that says so: a module or a file. Empty where no command does."""
    arguments: tuple[str, ...]
    """The words behind it, arrays spread; redirections are left out."""


def training_command(text: str, entry: re.Pattern[str]) -> TrainingCommand:
    """The last command with a word that `entry` matches."""
    reader = _Reader()
    found = TrainingCommand("", ())
    for command in commands(text):
        words = _without_redirections(reader.take(command))
        index = next((index for index, word in enumerate(words) if entry.search(word)), None)
        if index is not None:
            found = TrainingCommand(words[index], tuple(words[index + 1 :]))
    return found


def _without_redirections(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    target = False
    for word in words:
        redirection = _REDIRECTION.fullmatch(word)
        if redirection is None and not target:
            kept.append(word)
        # A file's name may be a word of its own.
        target = redirection is not None and not redirection[1]
    return kept


@dataclass(slots=True)
class _Block:
    """An `if`, `case`, loop, function or group that is open."""

    closed_by: str
    runs: Truth
    """Whether its present branch does."""
    asks: bool = False
    """Before `then`, or where a pattern of a `case` is expected: there is no branch yet."""
    earlier: Truth = False
    """Whether a branch before the present one ran."""
    met: Truth = False
    """Whether one of the patterns of the branch to come fits."""
    subject: str = ""
    """What a `case` compares."""
    before: Truth = True
    joined: str = ""
    """Outcome of the command before it, and what joins it to that."""

    def open_branch(self, met: Truth) -> None:
        """The next branch begins; it runs where its condition is met and none before it ran."""
        self.runs = _all((met, _not(self.earlier)))
        self.earlier = _any((self.earlier, met))
        self.asks = False


class _Reader:
    """Follows assignments and branches; knows of each command whether it runs."""

    def __init__(self) -> None:
        self._values = Values()
        self._blocks: list[_Block] = []
        self._outcome: Truth = True
        self._joined = ""
        self._function = False

    def take(self, command: Command) -> list[str]:
        """Take an assignment or a keyword in, or return the words of a command that runs or perhaps does."""
        joined, self._joined = self._joined, command.end
        words = [] if command.array else self._after_keywords(command, joined)
        if command.array:
            runs = self._runs(joined)
            if runs is not False:
                listed = self._values.words(command.words)
                self._values.extend(command.array, listed, append=command.append, perhaps=runs is None)
        taken = self._simple(words, joined) if words else []
        if command.end == ";;" and self._blocks and self._blocks[-1].closed_by == "esac":
            self._blocks[-1].asks, self._blocks[-1].met = True, False
        return taken

    def _runs(self, joined: str) -> Truth:
        """Whether a command here runs: by the blocks around it, and by the one that `&&` or `||` joins it to."""
        runs = _all(block.runs for block in self._blocks if not block.asks)
        if joined == "&&":
            return _all((runs, self._outcome))
        return _all((runs, _not(self._outcome))) if joined == "||" else runs

    def _after_keywords(self, command: Command, joined: str) -> Sequence[Word]:
        """The words behind keywords and patterns, which are taken in; empty where that is all."""
        words: Sequence[Word] = command.words
        while words:
            taken = self._pattern(words[0], command.end) or self._opens(words, joined) or self._goes_on(words[0])
            if not taken:
                break
            words = words[taken:]
        if command.end == "(" and len(words) == 1:
            # A function: nobody here follows who calls it.
            self._function = True
            return []
        return words

    def _opens(self, words: Sequence[Word], joined: str) -> int:
        """How many words open a block; 0 where the first does not."""
        match _bare(words[0]):
            case "if":
                self._blocks.append(_Block("fi", None, asks=True))
            case "while" | "until":
                self._blocks.append(_Block("done", None))
            case "for" | "select":
                self._blocks.append(_Block("done", None))
                return len(words)
            case "case" if len(words) > 1:
                self._blocks.append(_Block("esac", False, asks=True, subject=self._values.value(words[1])))
                return 2
            case "{":
                runs = None if self._function else self._runs(joined)
                self._blocks.append(_Block("}", runs, before=self._outcome, joined=joined))
                self._function = False
            case _:
                return 0
        return 1

    def _goes_on(self, word: Word) -> int:
        """1 where the word closes the innermost block or begins another branch of it."""
        keyword = _bare(word)
        block = self._blocks[-1] if self._blocks else None
        if block and keyword == block.closed_by:
            self._blocks.pop()
            outcome = self._outcome if keyword == "}" else None
            self._outcome = _chained(block.joined, block.before, outcome)
        elif block and block.closed_by == "fi" and keyword in ("then", "elif", "else"):
            block.asks = keyword == "elif"
            if not block.asks:
                block.open_branch(self._outcome if keyword == "then" else True)
        else:
            return int(keyword in ("do", "time"))
        return 1

    def _pattern(self, word: Word, end: str) -> int:
        """1 where the word is a pattern of a `case`, or the `in` before them."""
        block = self._blocks[-1] if self._blocks else None
        if block is None or not (block.asks and block.closed_by == "esac") or _bare(word) == "esac":
            return 0
        if _bare(word) != "in":
            block.met = _any((block.met, _fits(block.subject, self._values.value(word))))
            if end == ")":
                block.open_branch(block.met)
        return 1

    def _simple(self, words: Sequence[Word], joined: str) -> list[str]:
        runs = self._runs(joined)
        negated = _bare(words[0]) == "!"
        words = words[negated:]
        if words and _bare(words[0]) in ("[", "[[", "test"):
            outcome = _tested([self._values.value(word) for word in words[1:] if _bare(word) not in ("]", "]]")])
        elif runs is not False and self._assigns(words, perhaps=runs is None):
            outcome = True
        else:
            outcome = None
        self._outcome = _chained(joined, self._outcome, _not(outcome) if negated else outcome)
        return [] if runs is False else self._values.words(words)

    def _assigns(self, words: Sequence[Word], *, perhaps: bool) -> bool:
        """Take `NAME=value …` in. False where it is a command, which keeps such to itself."""
        if words and _bare(words[0]) in _DECLARES:
            words = [word for word in words[1:] if _ASSIGNMENT.match(word[0].text)]
        found = [_ASSIGNMENT.match(word[0].text) for word in words]
        if not found or None in found:
            return False
        for word, match in zip(words, found, strict=True):
            assert match is not None
            value = self._values.value(word)[match.end() :]
            self._values.set(match[1], value, append=bool(match[2]), perhaps=perhaps)
        return True


def _bare(word: Word) -> str:
    """A word without quotes, which alone can be a keyword; empty for any other."""
    return word[0].text if len(word) == 1 and word[0].splits else ""


def _tested(words: Sequence[str]) -> Truth:
    """What `[ … ]` says."""
    match words:
        case ["!", *rest]:
            return _not(_tested(rest))
        case ["-n" | "-z" as kind, value]:
            return None if UNKNOWN in value else (value == "") == (kind == "-z")
        case [one, "=" | "==", other]:
            return _fits(one, other)
        case [one, "!=", other]:
            return _not(_fits(one, other))
        case [one, comparison, other] if comparison in _COMPARISONS and _is_whole(one) and _is_whole(other):
            return _COMPARISONS[comparison](int(one), int(other))
        case _:
            return None


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", text) is not None


def _fits(value: str, pattern: str) -> Truth:
    if UNKNOWN not in value + pattern:
        return value == pattern or fnmatchcase(value, pattern)
    if pattern == "*":
        return True
    return _DEVICES.get(pattern) if value == UNKNOWN else _DEVICES.get(value) if pattern == UNKNOWN else None


def _chained(joined: str, before: Truth, outcome: Truth) -> Truth:
    """Outcome of what `joined` joins to what came before."""
    if joined == "&&":
        return _all((before, outcome))
    return _any((before, outcome)) if joined == "||" else outcome


def _not(truth: Truth) -> Truth:
    return None if truth is None else not truth


def _all(truths: Iterable[Truth]) -> Truth:
    found = list(truths)
    return False if False in found else None if None in found else True


def _any(truths: Iterable[Truth]) -> Truth:
    found = list(truths)
    return True if True in found else None if None in found else False
