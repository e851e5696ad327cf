"""What `pearl-rl import` makes of the configuration files that verl, slime, ROLL and AReaL publish.

    uv run python integration/guests/public_files.py verl=../verl slime=../slime roll=../ROLL areal=../AReaL

Each folder is a clone, a bare clone, or an unpacked archive; files of other people are not kept here. Every shell
script and YAML file outside hidden folders goes through the command itself and must give settings that are valid, or
one line that says why not. `public_files.json` names some of them by repository, commit and SHA-256, with what must
come out.

Exit codes: 0 all as it must be; 1 a file that gives neither, or another outcome than the one on record; 2 arguments.
"""

import argparse
import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import typer

from pearl_rl.cli.app import app
from pearl_rl.errors import ExitCode, SettingsError
from pearl_rl.frameworks import NAMES
from pearl_rl.settings import load_settings

RECORD: Final = Path(__file__).with_suffix(".json")
SUFFIXES: Final = (".sh", ".yaml", ".yml")
LONGEST_LINE: Final = 500
COMMAND: Any = typer.main.get_command(app)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the command made of one file."""

    path: str
    kind: str
    """`valid`, `line` or `neither`."""
    line: str = ""
    """The line on standard error, or what was wrong where it gave neither."""
    settings: dict[str, Any] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Walked:
    """All files of one checkout."""

    framework: str
    commit: str
    files: Sequence[Outcome]

    @property
    def counts(self) -> dict[str, int]:
        """How many ended in which way."""
        kinds = [file.kind for file in self.files]
        return {kind: kinds.count(kind) for kind in ("valid", "line", "neither")}


Verdict = tuple[Mapping[str, Any], list[str] | None]
"""A file on record with what differs; None where no checkout holds it."""


class Checkout:
    """Files of a project: of the newest commit of a git directory, or of a folder as it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bare = (folder / "HEAD").is_file() and (folder / "objects").is_dir()
        self._git = self._bare or (folder / ".git").exists()
        found = self._ask("rev-parse", "--verify", "HEAD", check=self._bare) if self._git else b""
        self.commit: str = found.decode().strip()
        """Empty for a folder that git does not know."""

    def names(self) -> list[str]:
        """Paths of scripts and YAML files, links and hidden folders left out."""
        if self._bare:
            listed = self._ask("ls-tree", "-r", "-z", "HEAD").decode(errors="replace").split("\0")
            rows = [row.partition("\t") for row in listed if row]
            found: Iterable[str] = (name for kind, _, name in rows if kind.startswith("100"))
        else:
            files = (path for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink())
            found = (path.relative_to(self._folder).as_posix() for path in files)
        return sorted(name for name in found if name.endswith(SUFFIXES) and not _hidden(name))

    def read(self, name: str) -> bytes:
        """A file of `names`."""
        return self._ask("cat-file", "blob", f"HEAD:{name}") if self._bare else (self._folder / name).read_bytes()

    def on_record(self, commit: str, name: str, digest: str) -> bytes | None:
        """The file of that digest: of that commit, or here under that path. None where neither is held."""
        texts = []
        if self._git:
            texts.append(self._ask("cat-file", "blob", f"{commit}:{name}", check=False))
        if not self._bare and (self._folder / name).is_file():
            texts.append((self._folder / name).read_bytes())
        elif self._bare:
            texts.append(self._ask("cat-file", "blob", f"HEAD:{name}", check=False))
        return next((text for text in texts if hashlib.sha256(text).hexdigest() == digest), None)

    def _ask(self, *words: str, check: bool = True) -> bytes:
        return subprocess.run(["git", "-C", str(self._folder), *words], capture_output=True, check=check).stdout


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def imported(framework: str, name: str, text: bytes, scratch: Path) -> Outcome:
    """Run `pearl-rl import` on a file of that name and text, and read what it wrote as a configuration."""
    file, written = scratch / "files" / name, scratch / "job.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text)
    written.unlink(missing_ok=True)
    printed, complained = io.StringIO(), io.StringIO()
    words = ["import", framework, str(file), "--output", str(written), "--json"]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained), warnings.catch_warnings():
            warnings.simplefilter("error")
            code = COMMAND.main(words, standalone_mode=False)
    except BaseException:
        return Outcome(name, "neither", traceback.format_exc(limit=-1).strip())
    finally:
        file.unlink()
    error = complained.getvalue().replace(str(file), name)
    if code == ExitCode.OK and not error:
        return _valid(name, json.loads(printed.getvalue()), written)
    clear = error.startswith(f"pearl-rl: {name}: ") and error.count("\n") == 1 and len(error) <= LONGEST_LINE
    kind = "line" if code == ExitCode.CONFIG and clear and not printed.getvalue() else "neither"
    return Outcome(name, kind, error.removeprefix("pearl-rl: ").strip() or f"exit code {code} and no word")


def _valid(name: str, body: Mapping[str, Any], written: Path) -> Outcome:
    """Whether what was written is a configuration, and each key that was left out has a line."""
    try:
        load_settings(written, [])
    except SettingsError as error:
        return Outcome(name, "neither", f"its settings are not valid: {error}")
    unclear = [line for line in body["unsupported"] if ": " not in line or "\n" in line]
    if unclear:
        return Outcome(name, "neither", f"no reason for a key that is left out: {unclear[0]}")
    return Outcome(name, "valid", settings=body["settings"], unsupported=tuple(body["unsupported"]))


def differences(outcome: Outcome, expected: Mapping[str, Any]) -> list[str]:
    """What is other than on record: settings, keys without a counterpart, or words of the one line."""
    if "line" in expected:
        found = outcome.kind == "line" and expected["line"] in outcome.line
        return [] if found else [f"no line with '{expected['line']}', but {outcome.kind}: {outcome.line}"]
    if outcome.kind != "valid":
        return [f"no valid settings: {outcome.line}"]
    wrong = [
        f"{key} = {outcome.settings.get(key)!r}, not {value!r}"
        for key, value in expected["settings"].items()
        if outcome.settings.get(key) != value
    ]
    named = [line.partition(": ")[0] for line in outcome.unsupported]
    return wrong + [f"{key} is not named" for key in expected.get("unsupported", []) if key not in named]


def verdicts(
    checkouts: Sequence[tuple[str, Checkout]], record: Iterable[Mapping[str, Any]], scratch: Path
) -> list[Verdict]:
    """Each file on record of the frameworks that are given."""
    found: list[Verdict] = []
    for entry in record:
        framework, name = entry["framework"], entry["path"]
        held = [checkout for given, checkout in checkouts if given == framework]
        texts = (checkout.on_record(entry["commit"], name, entry["sha256"]) for checkout in held)
        text = next((text for text in texts if text is not None), None)
        if held:
            outcome = None if text is None else imported(framework, name, text, scratch)
            found.append((entry, None if outcome is None else differences(outcome, entry)))
    return found


def _json(walked: Iterable[Walked], known: Iterable[Verdict]) -> list[str]:
    projects = [{"framework": each.framework, "commit": each.commit, **each.counts} for each in walked]
    for project, each in zip(projects, walked, strict=True):
        project["outcomes"] = [asdict(file) for file in each.files]
    on_record = [{"framework": entry["framework"], "path": entry["path"], "differs": what} for entry, what in known]
    return [json.dumps({"projects": projects, "on_record": on_record}, indent=1)]


def _text(walked: Iterable[Walked], known: Sequence[Verdict], *, show: bool) -> list[str]:
    lines = []
    for each in walked:
        at, counts = each.commit[:12] or "a folder", each.counts
        lines.append(
            f"{NAMES[each.framework]:5}  {at:12}  {len(each.files):4} files: {counts['valid']} valid settings, "
            f"{counts['line']} one line, {counts['neither']} neither"
        )
        lines += [_shown(file) for file in each.files if show or file.kind == "neither"]
    wrong = [(entry, what) for entry, what in known if what]
    missing = [entry for entry, what in known if what is None]
    as_expected = len(known) - len(wrong) - len(missing)
    lines.append(f"on record: {as_expected} as they must be, {len(wrong)} not, {len(missing)} not in these checkouts")
    lines += [f"  {entry['framework']} {entry['path']}: {'; '.join(what or ())}" for entry, what in wrong]
    lines += [f"  {entry['framework']} {entry['path']}: of commit {entry['commit'][:12]}" for entry in missing if show]
    return lines


def _shown(outcome: Outcome) -> str:
    if outcome.kind == "valid":
        what = f"{len(outcome.settings)} settings, {len(outcome.unsupported)} keys without a counterpart"
    else:
        what = outcome.line.removeprefix(f"{outcome.path}: ")
    return f"  {outcome.kind:7}  {outcome.path}: {what}"


def _given(word: str) -> tuple[str, Checkout]:
    framework, equals, folder = word.partition("=")
    if framework not in NAMES or not equals:
        raise argparse.ArgumentTypeError(f"'{word}' is not NAME=FOLDER with NAME one of {', '.join(NAMES)}")
    if not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{folder}: no such folder; give a clone or an unpacked archive")
    try:
        return framework, Checkout(Path(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        why = (
            error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else error
        )
        raise argparse.ArgumentTypeError(f"{folder}: git cannot read it: {' '.join(str(why).split())}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=_given, metavar="NAME=FOLDER")
    parser.add_argument("--show", action="store_true", help="list each file with its outcome")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--record", type=Path, default=RECORD, help="files with what must come out (%(default)s)")
    chosen = parser.parse_args(arguments)
    record = json.loads(chosen.record.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        walked = [
            Walked(
                framework,
                checkout.commit,
                [imported(framework, name, checkout.read(name), scratch) for name in checkout.names()],
            )
            for framework, checkout in chosen.checkouts
        ]
        known = verdicts(chosen.checkouts, record, scratch)
    report = _json if chosen.as_json else partial(_text, show=chosen.show)
    print("\n".join(report(walked, known)))
    good = all(file.kind != "neither" for each in walked for file in each.files)
    return int(not good or any(what for _, what in known))


if __name__ == "__main__":
    sys.exit(main())
