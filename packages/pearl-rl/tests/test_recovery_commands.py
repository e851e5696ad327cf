"""`resume`, `replay-journal` and the lock of a run folder, on a journal written by hand."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pearl_executor.availability import TraceSource
from pearl_planner.elastic import initial_state
from pearl_planner.step import step
from pearl_rl import parts
from pearl_rl.cli.app import app
from pearl_rl.cli.recovery import replayed, resume_run
from pearl_rl.errors import CommandError
from pearl_rl.journal.run_journal import RunJournal, recover
from pearl_rl.journal.state_codec import decode_state, encode_state
from pearl_rl.journal.storage import FolderStorage
from pearl_rl.rollout.ledger import GroupOpened, RolloutLedger, SampleDispatched
from pearl_rl.run_folder import RunFolder
from pearl_rl.run_lock import RunLock
from pearl_rl.settings import load_settings
from pearl_state.effects import PrepareGroup
from pearl_state.events import ConfigurationPinned, GpusOffered, GroupPrepared, RolloutBegan, RunResumed
from pearl_state.lifecycle import Lifecycle
from pearl_state.roles import Tenure
from pearl_state.trajectory import GroupId, TrajectoryId
from pearl_state.worker import GpuId

RESERVED = GpusOffered(now_s=1.0, gpus=frozenset(map(GpuId, (2, 3))), tenure=Tenure.RESERVED)
LENT = GpusOffered(now_s=2.0, gpus=frozenset(map(GpuId, (4, 5))))


@pytest.fixture
def run(tmp_path):
    """A run folder whose journal holds two records of the rollout and five events; and its state."""
    resolved = load_settings(None, [])
    folder = tmp_path / "run"
    RunFolder.create(resolved, folder).close()
    elastic = parts.elastic_settings(resolved.settings)
    state = initial_state(
        settings=elastic,
        workload=parts.prior_workload(resolved.settings),
        platform=parts.prior_platform(
            resolved.settings, {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
        ),
        training_gpus=2,
    )
    storage = FolderStorage(folder / "journal")
    journal = RunJournal(storage, state, RolloutLedger(), snapshot_every=4)
    journal.note(GroupOpened(group=GroupId("g0"), step=1, number=0))
    journal.note(SampleDispatched(group=GroupId("g0"), trajectory=TrajectoryId("t0"), number=0, version=0))
    events = [RESERVED, LENT, RolloutBegan(now_s=3.0, step=1, batch=64)]
    for event in events:
        journal.append(event, {})
        state, effects = step(state, event)
        if event is RESERVED:
            (group,) = (effect for effect in effects if isinstance(effect, PrepareGroup))
            reported = {worker.id: 0 for worker in group.workers}
            events.append(GroupPrepared(now_s=9.0, plan_id=group.plan_id, reported=reported))
        journal.applied(state)
    journal._journal.commit_now()
    storage.close()
    return folder, elastic, state


def test_a_state_survives_its_json_with_a_plan_under_way(run) -> None:
    _, elastic, state = run
    assert state.running is not None
    assert state.groups
    again = decode_state(json.loads(json.dumps(encode_state(state))), elastic)
    assert encode_state(again) == encode_state(state)
    assert (again.table, again.running, again.groups) == (state.table, state.running, state.groups)


def test_the_command_tells_every_event_and_the_state_they_lead_to(run) -> None:
    folder, _, state = run
    done = CliRunner().invoke(app, ["replay-journal", str(folder), "--explain"])
    assert done.exit_code == 0
    assert "GpusOffered" in done.stdout
    assert f"table version {state.table.version}" in done.stdout
    lines = [json.loads(line) for line in CliRunner().invoke(
        app, ["replay-journal", str(folder), "--json"]
    ).stdout.splitlines()]  # fmt: skip
    assert [line["event"] for line in lines[:-1]].count("GpusOffered") == 2
    assert len(lines[-1]["table"]) == len(state.table.rows)


def test_the_state_is_the_same_from_the_newest_snapshot_and_from_the_start(run) -> None:
    folder, elastic, state = run
    storage = FolderStorage(folder / "journal")
    assert len(storage.segments()) > 1
    newest, whole = recover(storage, elastic), recover(storage, elastic, since=0)
    assert encode_state(newest.state) == encode_state(whole.state) == encode_state(state)
    assert newest.rollout.to_json() == whole.rollout.to_json()
    assert newest.records < whole.records == 6
    assert whole.rollout.position.next_trajectory == 1


def test_replaying_names_every_event_and_decision_and_stops_where_told(run) -> None:
    folder, _, _ = run
    lines = list(replayed(folder, None))
    assert [line.split()[-1] for line in lines if " s  " in line] == [
        "GpusOffered",
        "GpusOffered",
        "RolloutBegan",
        "GroupPrepared",
    ]
    assert any("decided" in line for line in lines)
    assert any("1 groups open, 1 trajectories under way" in line for line in lines)
    later = list(replayed(folder, None, since=5))
    assert [line.split()[-1] for line in later if " s  " in line] == ["GroupPrepared"]
    assert later[-1] == lines[-1]
    (told,) = (line for line in later if line.startswith("after "))
    assert int(told.split()[1]) < 6
    early = list(replayed(folder, 3))
    assert sum("GpusOffered" in line for line in early) == 1
    explained = list(replayed(folder, None, explain=True))
    assert len(explained) > len(lines)
    table = json.loads(list(replayed(folder, 3, as_json=True))[-1])["table"]
    assert [row["lifecycle"] for row in table if row["zone"] == "dedicated"] == ["starting", "starting"]


def test_what_holds_no_run_or_no_journal_is_refused_in_one_line(tmp_path, run) -> None:
    folder, _, _ = run
    with pytest.raises(CommandError, match=r"holds no config\.resolved\.toml"):
        resume_run(tmp_path, as_json=False, plain=True)
    with pytest.raises(CommandError, match="--at -1: must be 0 or more"):
        list(replayed(folder, -1))
    with pytest.raises(CommandError, match="--since -2: must be 0 or more"):
        list(replayed(folder, None, since=-2))
    with pytest.raises(CommandError, match="--since 4: lies behind --at 3"):
        list(replayed(folder, 3, since=4))
    first = folder / "journal" / "00000001.journal"
    data = bytearray(first.read_bytes())
    data[40] ^= 1
    first.write_bytes(data)
    with pytest.raises(CommandError, match=r"what comes before record 4 is damaged or missing, and record 0 is asked"):
        list(replayed(folder, 2))
    with pytest.raises(CommandError, match="holds no complete one, though the run had begun"):
        resume_run(folder, as_json=False, plain=True)
    for file in (folder / "journal").iterdir():
        file.unlink()
    complete = folder / "checkpoints" / "step-00000002" / "run.json"
    complete.parent.mkdir()
    complete.write_text("{}")
    with pytest.raises(CommandError, match="holds checkpoints and no journal"):
        resume_run(folder, as_json=False, plain=True)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_journal_of_garbage_is_told_with_the_command_that_goes_on_before_anything_is_changed(
    run, capsys, checkpoints
) -> None:
    folder = run[0]
    if checkpoints:
        (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
        (folder / "checkpoints" / "step-00000001" / "run.json").write_text("{}")
    for file in (folder / "journal").iterdir():
        file.write_bytes(b"\x00\xffgarbage" * 20)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(CommandError, match=r"is damaged: none of its \d files begins with a snapshot") as refused:
        resume_run(folder, as_json=False, plain=True) if checkpoints else list(replayed(folder, None))
    if checkpoints:
        new = f"pearl-rl train {folder}/config.resolved.toml --set run.resume_from={folder}"
        assert str(refused.value).endswith(f"put it back, or go on from the newest checkpoint in a new run: {new}")
    assert capsys.readouterr().out == ""
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


def test_a_run_that_made_all_its_steps_is_left_as_it_is(run) -> None:
    folder, _, _ = run
    summary = {"steps": 60, "wall_s": 1.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = CliRunner().invoke(app, ["resume", str(folder)])
    assert (done.exit_code, done.stdout) == (0, f"{folder}: all its 60 steps are made; nothing is left to do\n")
    assert json.loads(CliRunner().invoke(app, ["resume", str(folder), "--json"]).stdout) == summary
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("file", ["decisions.jsonl", "metrics.jsonl"])
def test_a_damaged_line_is_named_before_a_run_goes_on(run, file) -> None:
    folder = run[0]
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001" / "run.json").write_text("{}")
    (folder / file).write_text("{}\n[1\n")
    (folder / "summary.json").write_text('{"steps": "many"}')
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(CommandError, match=rf"{file}: line 2 is no JSON object .*; the file is damaged"):
        resume_run(folder, as_json=False, plain=True)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before


@pytest.mark.torch
@pytest.mark.parametrize("left", ["nothing", "a torn snapshot", "a first snapshot"])
def test_a_run_that_ended_before_it_played_anything_begins_anew_with_its_settings(run, monkeypatch, left) -> None:
    folder, _, state = run
    shutil.rmtree(folder / "journal")
    (folder / "model").mkdir()
    (folder / "events.jsonl").write_text("{}\n")
    storage = FolderStorage(folder / "journal")
    if left != "nothing":
        RunJournal(storage, initial_like(state), RolloutLedger())
        storage.close()
    if left == "a torn snapshot":
        (folder / "journal" / "00000001.journal").write_bytes(b"PJL1torn")
    before = (folder / "config.resolved.toml").read_bytes()
    ran = []

    def run_in_folder(job, settings, opened, **_):
        ran.append((job.keywords["resume"], settings.run.steps))
        raise CommandError("ran")

    monkeypatch.setattr("pearl_rl.cli.train.run_in_folder", run_in_folder)
    with pytest.raises(CommandError, match=r"^ran$"):
        resume_run(folder, as_json=False, plain=True)
    assert ran == [(False, 60)]
    assert (folder / "config.resolved.toml").read_bytes() == before
    assert not (folder / "model").exists()
    assert not (folder / "journal").exists()
    assert (folder / "events.jsonl").read_bytes() == b""


def initial_like(state):
    """A first state of the same settings."""
    return initial_state(settings=state.settings, workload=state.workload, platform=state.platform, training_gpus=2)


def test_the_time_under_way_is_that_of_all_control_planes_and_of_nothing_between_them(run) -> None:
    folder, elastic, _ = run
    storage = FolderStorage(folder / "journal")
    recovered = recover(storage, elastic)
    assert recovered.clock == recover(storage, elastic, since=0).clock
    # Events of the fixture are at 1, 2, 3 and 9 s.
    assert (recovered.clock.now_s, recovered.clock.elapsed_s) == (9.0, 8.0)
    again = RunJournal(storage, recovered.state, recovered.rollout, recovered.clock)
    again.append(RunResumed(now_s=500.0, weight_version=0), {})
    again.append(RolloutBegan(now_s=502.5, step=2, batch=64), {})
    again._journal.commit_now()
    assert recover(storage, elastic).clock.elapsed_s == 10.5
    assert recover(storage, elastic, since=0).clock.elapsed_s == 10.5


def test_the_budget_of_failures_is_that_of_the_settings() -> None:
    given = ["cluster.min_healthy=2", "cluster.max_restarts=5", "cluster.expansion_workers=7"]
    chosen = load_settings(None, given).settings
    elastic = parts.elastic_settings(chosen)
    assert (elastic.min_healthy, elastic.max_restarts, elastic.expansion_workers) == (2, 5, 7)
    assert parts.elastic_settings(load_settings(None, []).settings).min_healthy == 0


def test_a_trace_goes_on_where_it_was_when_the_run_ended() -> None:
    settings = load_settings(None, []).settings
    (whole,) = (s for s in parts.availability(settings)._sources if isinstance(s, TraceSource))
    later_s = whole.steps[2].t_s + 0.5
    (rest,) = (s for s in parts.availability(settings, elapsed_s=later_s)._sources if isinstance(s, TraceSource))
    assert rest.steps[0] == dataclasses.replace(whole.steps[2], t_s=0.0)
    assert [(row.t_s, row.count) for row in rest.steps[1:]] == [
        (pytest.approx(row.t_s - later_s), row.count) for row in whole.steps[3:]
    ]


def test_a_second_control_plane_is_refused_and_named_and_the_lock_ends_with_its_process(run) -> None:
    folder, _, _ = run
    hold = (
        "import sys; from pathlib import Path; from pearl_rl.run_lock import RunLock;"
        f"lock = RunLock(Path({str(folder)!r})); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CommandError, match=f"process {holder.pid} runs this run"):
            resume_run(folder, as_json=False, plain=True)
        holder.kill()
        holder.wait()
    with RunLock(folder), pytest.raises(CommandError, match="runs this run"):
        RunLock(folder)


def test_a_resumed_run_keeps_reserved_slots_and_what_was_learned_and_nothing_under_way(run) -> None:
    _, _, state = run
    state, _ = step(state, ConfigurationPinned(now_s=4.0, configuration=None))
    before = {row.id: row for row in state.table.rows.values()}
    state, effects = step(state, RunResumed(now_s=0.0, weight_version=7))
    rows = state.table.rows
    kept = {id_ for id_, row in rows.items() if row.gpus & RESERVED.gpus}
    assert {gpu for id_ in kept for gpu in rows[id_].gpus} == RESERVED.gpus
    assert not any(row.gpus & LENT.gpus for row in rows.values())
    assert all(rows[id_].failures == before[id_].failures for id_ in kept)
    assert all(rows[id_].incarnation == before[id_].incarnation + 1 for id_ in kept)
    assert [type(effect).__name__ for effect in effects] == ["PrepareGroup"]
    assert (state.table.target_version, state.table.floor_version) == (7, 7)
    assert all(rows[id_].lifecycle is Lifecycle.ACTIVE for id_ in state.table.training())
    assert (state.running, state.removals, state.doomed, state.training_wanted) == (None, {}, {}, False)
