"""`pearl-rl resume` and `pearl-rl replay-journal`: a run after its control plane ended, however it ended."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pearl_rl import parts
from pearl_rl.checkpoints import COMPLETE
from pearl_rl.encoding import encode, json_line
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.journal.frames import JournalError
from pearl_rl.journal.journal import Journal, read
from pearl_rl.journal.run_journal import Recovered, apply, begun, recover
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.report.lines import read_lines
from pearl_rl.run_folder import CONFIG_TOML, METRICS, SUMMARY, RunFolder
from pearl_rl.run_lock import RunLock
from pearl_rl.run_of_train import require_run
from pearl_rl.settings import Settings, load_settings
from pearl_state.effects import Effect, RecordDecision
from pearl_state.events import Event


def resume_run(run_dir: Path, *, as_json: bool, plain: bool) -> ExitCode:
    """Run the command. Raises `CommandError` before anything is changed where the run cannot go on."""
    from pearl_rl.cli.train import report_outcome, run_in_folder
    from pearl_rl.preflight import check_installed

    settings = _settings(run_dir)
    done = _summary(run_dir)
    steps = done.get("steps", 0)
    if isinstance(steps, int) and steps >= settings.run.steps:
        print(
            json.dumps(done) if as_json else f"{run_dir}: all its {done['steps']} steps are made; nothing is left to do"
        )
        return ExitCode.OK
    with RunLock(run_dir):
        goes_on = _goes_on(run_dir, settings)
        if goes_on:
            _check_lines(run_dir)
        check_installed(settings)
        from pearl_rl.compose import train

        with (RunFolder.open if goes_on else RunFolder.start_over)(run_dir) as folder:
            going_on = functools.partial(train, resume=goes_on)
            try:
                outcome = run_in_folder(going_on, settings, folder, as_json=as_json, plain=plain)
            except JournalError as error:
                raise CommandError(f"{run_dir}/journal: {error}") from None
        return report_outcome(outcome, settings, folder, as_json=as_json)


def _summary(run_dir: Path) -> Mapping[str, Any]:
    """What a run that ended wrote of itself; empty where it wrote nothing that can be read."""
    try:
        found: Any = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_lines(run_dir: Path) -> None:
    """Raise `CommandError` where a file is damaged that a run reads to go on behind it."""
    for name in ("decisions.jsonl", METRICS):
        for _ in read_lines(run_dir / name):
            pass


def _goes_on(run_dir: Path, settings: Settings) -> bool:
    """Whether there is anything to go on with: a run that ended before its first checkpoint had not begun to play.

    Raises `CommandError` where journal or checkpoints of a run that had begun are missing.
    """
    storage = FolderStorage(run_dir / "journal")
    complete = any(run_dir.glob(COMPLETE))
    if complete and not storage.segments():
        raise CommandError(f"{run_dir}: holds checkpoints and no journal; give them to a new run as run.resume_from")
    try:
        # A first snapshot that was cut short is none of a run that had a checkpoint.
        begun_rollout = (complete or not Journal(storage).empty) and recover(
            storage, parts.elastic_settings(settings)
        ).rollout.groups
    except JournalError as error:
        raise _unreadable(run_dir, error) from None
    if begun_rollout and not complete:
        raise CommandError(f"{run_dir}/checkpoints: holds no complete one, though the run had begun; put one back")
    return complete


def _unreadable(run_dir: Path, error: JournalError) -> CommandError:
    """A journal that a run cannot go on from, and what its owner can do."""
    settings = run_dir / CONFIG_TOML
    goes_on = f" --set run.resume_from={run_dir}" if any(run_dir.glob(COMPLETE)) else ""
    what = "go on from the newest checkpoint in a new run" if goes_on else "begin anew with its settings"
    return CommandError(f"{run_dir}/journal: {error}; put it back, or {what}: pearl-rl train {settings}{goes_on}")


def replayed(
    run_dir: Path, at: int | None, *, since: int | None = None, as_json: bool = False, explain: bool = False
) -> Iterator[str]:
    """The lines of the command. Raises `CommandError` where the folder holds no readable journal."""
    settings = parts.elastic_settings(_settings(run_dir))
    for name, number in (("--at", at), ("--since", since)):
        if number is not None and number < 0:
            raise CommandError(f"{name} {number}: must be 0 or more")
    if since is not None and at is not None and since > at:
        raise CommandError(f"--since {since}: lies behind --at {at}; give an earlier record")
    try:
        begin, records = read(FolderStorage(run_dir / "journal"), up_to=at, since=since or 0)
        recovered = begun(begin, settings)
        for record in records:
            taken = apply(recovered, record)
            if taken is not None and record["n"] >= (since or 0):
                yield from _told(record["n"], *taken, as_json=as_json, explain=explain)
    except JournalError as error:
        raise CommandError(f"{run_dir}/journal: {error}") from None
    yield from _state_json(recovered) if as_json else _state(recovered)


def _settings(run_dir: Path) -> Settings:
    return load_settings(require_run(run_dir), ()).settings


def _told(number: int, event: Event, effects: tuple[Effect, ...], *, as_json: bool, explain: bool) -> Iterator[str]:
    """An event, and what was decided on it."""
    from pearl_planner.explain import explain as explained

    if as_json:
        names = [type(effect).__name__ for effect in effects]
        yield json_line({"n": number, "event": type(event).__name__, "now_s": event.now_s, "effects": names})
        return
    yield f"{number:>8}  {event.now_s:10.3f} s  {type(event).__name__}"
    for effect in effects:
        if isinstance(effect, RecordDecision):
            decision = effect.decision
            about = "borrowing" if effect.gate is not None else f"{decision.selected}: {decision.reason}"
            yield f"{'':>8}  {'':12}  decided {about}"
            if explain:
                yield from (f"{'':>22}  {line}" for line in explained(decision).splitlines())
        else:
            yield f"{'':>8}  {'':12}  → {type(effect).__name__}"


def _state(recovered: Recovered) -> Iterator[str]:
    """The state for people."""
    table, rollout = recovered.state.table, recovered.rollout
    yield f"after {recovered.records} records: table version {table.version}, weights {table.target_version}"
    for row in table.rows.values():
        gpus = ",".join(map(str, sorted(row.gpus)))
        of = f"worker {row.id}.{row.incarnation}  GPU {gpus}"
        yield f"  {of}  {row.role}  {row.lifecycle}  weights {row.weight_version}"
    counts = rollout.counts
    half = sum(len(group.outstanding) for group in rollout.groups.values())
    yield (
        f"  {len(rollout.groups)} groups open, {half} trajectories under way, {counts.buffered} complete and not used, "
        f"{counts.used} used"
    )


def _state_json(recovered: Recovered) -> Iterator[str]:
    rows: list[Any] = [encode(row) for row in recovered.state.table.rows.values()]
    yield json.dumps({"records": recovered.records, "table": rows, "counts": encode(recovered.rollout.counts)})
