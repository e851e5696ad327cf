"""`pearl-rl train` around the run: folder, views, summary, signals, time limit. The run itself is a small stand-in."""

import asyncio
import json
import os
import signal
import sys
import types
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pearl_executor.virtual_time import run_virtual
from pearl_rl.cli import app
from pearl_rl.cli import train as command
from pearl_rl.cli.train import Ending, Outcome, supervise
from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.observer import Observer, StepRecord
from pearl_rl.run_folder import RunFolder, read_lines
from pearl_rl.settings import Settings, load_settings
from pearl_rl.summary import TrainSummary
from pearl_state.events import GpusOffered
from pearl_state.worker import GpuId

RUNNER = CliRunner()
Body = Callable[[Observer, RunFolder], Awaitable[None]]


def summary(steps: int, folder: RunFolder) -> TrainSummary:
    return TrainSummary(
        steps=steps,
        reward_first10=0.1,
        reward_last10=0.4,
        trajectories=steps * 64,
        lost_trajectories=0,
        stale_served=0,
        expansions=1,
        reclaims=2,
        borrows=3,
        returns=3,
        mode_switches=1,
        ratio_switches=2,
        tokens_per_s=12.5,
        wall_s=steps * 1.0,
        run_dir=str(folder.path),
    )


class SmallRun:
    """Makes steps of no content, then does what `then` says; answers a cancel with the steps so far."""

    def __init__(self, steps: int, then: Body | None = None, *, sums_up: bool = True) -> None:
        self.steps = steps
        self.then = then
        self.sums_up = sums_up

    async def __call__(self, settings: Settings, folder: RunFolder, observer: Observer) -> TrainSummary:
        observer.on_event(GpusOffered(now_s=0.0, gpus=frozenset({GpuId(4)})))
        for step in range(1, self.steps + 1):
            record = StepRecord(step=step, steps=settings.run.steps, now_s=float(step), reward_mean=step / 10)
            folder.record_step(record)
            observer.on_step(record)
        try:
            if self.then is not None:
                await self.then(observer, folder)
        except asyncio.CancelledError:
            if not self.sums_up:
                raise
        return summary(self.steps, folder)


@pytest.fixture
def installed(monkeypatch):
    """Put a stand-in where the run is composed, as if all that training needs were installed."""

    def put(run: SmallRun) -> None:
        module = types.ModuleType("pearl_rl.compose")
        module.train = run
        monkeypatch.setitem(sys.modules, "pearl_rl.compose", module)
        monkeypatch.setattr("pearl_rl.preflight.find_spec", lambda name: object())

    return put


def train(folder: Path, *arguments: str) -> tuple[int, str, str]:
    result = RUNNER.invoke(app, ["train", "--run-dir", str(folder), "--set", "run.steps=3", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


async def forever(observer: Observer, folder: RunFolder) -> None:
    await asyncio.Event().wait()


async def interrupt(observer: Observer, folder: RunFolder) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()


# ---- what a run prints and leaves -----------------------------------------------------------------------------------


def test_a_run_prints_a_line_a_step_and_its_summary(tmp_path, installed):
    installed(SmallRun(3))
    code, out, err = train(tmp_path / "run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"run folder {tmp_path / 'run'}"
    assert sum(line.startswith("step ") for line in lines) == 3
    assert any("GPUs are emulated" in line and "the planner must find" in line for line in lines)
    assert "3 steps" in out
    assert "reward 0.400 on average" in out
    assert "offered   1 preemptible GPU at" in out


def test_nothing_is_said_of_pace_where_nothing_is_paced(tmp_path, installed):
    installed(SmallRun(3))
    assert "emulated" not in train(tmp_path / "run", "--set", "device.paced=false")[1]


def test_with_json_standard_output_is_the_summary_alone(tmp_path, installed):
    installed(SmallRun(3))
    code, out, err = train(tmp_path / "run", "--json")
    assert code == 0
    assert out.count("\n") == 1
    data = json.loads(out)
    assert list(data) == [
        "steps",
        "reward_first10",
        "reward_last10",
        "trajectories",
        "lost_trajectories",
        "stale_served",
        "expansions",
        "reclaims",
        "borrows",
        "returns",
        "mode_switches",
        "ratio_switches",
        "tokens_per_s",
        "wall_s",
        "run_dir",
    ]
    assert data["run_dir"] == str(tmp_path / "run")
    assert "step 3/3" in err
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == data


def test_the_folder_is_made_with_the_settings_before_the_run_begins(tmp_path, installed):
    async def look(observer: Observer, folder: RunFolder) -> None:
        assert load_settings(folder.path / "config.resolved.toml").settings.run.steps == 3

    installed(SmallRun(3, look))
    assert train(tmp_path / "run")[0] == 0
    assert len(list(read_lines(tmp_path / "run" / "metrics.jsonl"))) == 3


def test_without_run_dir_the_folder_is_named_after_the_time(tmp_path, installed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    installed(SmallRun(3))
    assert RUNNER.invoke(app, ["train", "--set", "run.steps=3"]).exit_code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "summary.json").is_file()


def test_a_second_run_into_one_folder_is_refused(tmp_path, installed):
    installed(SmallRun(3))
    assert train(tmp_path / "run")[0] == 0
    before = (tmp_path / "run" / "summary.json").read_text()
    code, out, err = train(tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "exists and is not empty" in err
    assert (tmp_path / "run" / "summary.json").read_text() == before


def test_what_is_not_installed_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pearl_rl.preflight.find_spec", lambda name: None)
    code, out, err = train(tmp_path / "run")
    assert (code, out) == (2, "")
    assert "train needs torch, transformers, tokenizers" in err
    assert "uv sync" in err
    assert not (tmp_path / "run").exists()


# ---- how a run ends -------------------------------------------------------------------------------------------------


def test_ctrl_c_stops_in_order_and_keeps_what_there_is(tmp_path, installed):
    installed(SmallRun(2, interrupt))
    code, out, err = train(tmp_path / "run", "--json")
    assert code == ExitCode.PARTIAL
    assert json.loads(out.splitlines()[-1])["steps"] == 2
    assert "stopped by a signal" in err
    assert "after 2 of 3 steps" in err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def interrupt_twice(observer: Observer, folder: RunFolder) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()


def test_one_ctrl_c_that_arrives_twice_is_one(tmp_path, installed, monkeypatch):
    # Not by the clock: a busy machine may stand still between the two.
    monkeypatch.setattr("pearl_rl.cli.train._SAME_SIGNAL_S", 1000.0)
    installed(SmallRun(2, interrupt_twice))
    code, _, err = train(tmp_path / "run")
    assert code == ExitCode.PARTIAL
    assert f"after 2 of 3 steps; to go on: pearl-rl resume {tmp_path / 'run'}" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("closed_after_lines", [0, 4])
def test_a_pipe_that_is_closed_stops_the_run_in_order_and_says_how_to_go_on(
    tmp_path, installed, monkeypatch, capsys, closed_after_lines
):
    reader, writer = os.pipe()
    if not closed_after_lines:
        os.close(reader)

    async def then(observer: Observer, folder: RunFolder) -> None:
        if closed_after_lines:
            os.close(reader)
        observer.on_message("one more line")
        observer.on_message("and another")
        await asyncio.Event().wait()

    installed(SmallRun(2, then))
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        monkeypatch.setattr("sys.stdout", out)
        code = app(["train", "--run-dir", str(tmp_path / "run")], standalone_mode=False)
        monkeypatch.undo()
    assert code == 5
    said = capsys.readouterr().err
    assert said == (
        "pearl-rl: the run stopped, as its output cannot be written any more, after 2 of 60 steps; "
        f"to go on: pearl-rl resume {tmp_path / 'run'}\n"
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_a_stopped_run_without_a_summary_says_where_to_look(tmp_path, installed):
    installed(SmallRun(2, interrupt, sums_up=False))
    code, out, err = train(tmp_path / "run", "--json")
    assert (code, out) == (ExitCode.PARTIAL, "")
    assert f"see {tmp_path / 'run'}, or go on: pearl-rl resume {tmp_path / 'run'}" in err
    assert not (tmp_path / "run" / "summary.json").exists()


def test_the_wall_limit_ends_a_run_with_its_own_exit_code(tmp_path, installed):
    installed(SmallRun(2, forever))
    code, _, err = train(tmp_path / "run", "--set", "run.wall_limit_s=0.01")
    assert code == ExitCode.TIMEOUT
    assert "reached run.wall_limit_s after 2 of 3 steps" in err


def test_fewer_steps_than_asked_for_is_a_partial_run(tmp_path, installed):
    installed(SmallRun(1))
    code, _, err = train(tmp_path / "run")
    assert code == ExitCode.PARTIAL
    assert "after 1 of 3 steps" in err


def test_a_run_that_cannot_start_ends_in_one_line(tmp_path, installed):
    async def fail(observer: Observer, folder: RunFolder) -> None:
        raise CommandError("no worker started: all of them\nfailed", ExitCode.INFEASIBLE)

    installed(SmallRun(0, fail))
    code, _, err = train(tmp_path / "run")
    assert code == ExitCode.INFEASIBLE
    assert err == "pearl-rl: no worker started: all of them failed\n"


class Recorder:
    """A view that keeps messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.ticks = 0

    def on_table(self, table):
        pass

    def on_decision(self, decision, trigger):
        pass

    def on_step(self, record):
        pass

    def on_event(self, event):
        pass

    def on_message(self, text):
        self.messages.append(text)

    def tick(self):
        self.ticks += 1


def supervised(run: SmallRun, view: Recorder, folder: RunFolder, wall_limit_s: float) -> Outcome:
    settings = load_settings(None, [f"run.wall_limit_s={wall_limit_s}"]).settings
    return run_virtual(supervise(run, settings, folder, view))


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(load_settings(), tmp_path / "run") as made:
        yield made


def test_the_view_is_redrawn_while_the_run_is_silent(folder):
    async def wait(observer: Observer, folder: RunFolder) -> None:
        await asyncio.sleep(60)

    view = Recorder()
    assert supervised(SmallRun(1, wait), view, folder, 100).ending is Ending.FINISHED
    assert view.ticks == pytest.approx(60 / command._TICK_S, abs=2)


def test_a_run_that_does_not_stop_is_given_up_after_a_stated_time(folder):
    async def stubborn(observer: Observer, folder: RunFolder) -> None:
        for _ in range(3):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(25)

    view = Recorder()
    outcome = supervised(SmallRun(1, stubborn), view, folder, 10)
    assert outcome == Outcome(Ending.TIMED_OUT, given_up=True)
    assert "did not stop within 30.0 s" in view.messages[-1]


def test_a_run_that_tidies_up_within_the_grace_still_sums_up(folder):
    async def tidy(observer: Observer, folder: RunFolder) -> None:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.sleep(20)

    outcome = supervised(SmallRun(1, tidy), Recorder(), folder, 10)
    assert outcome.ending is Ending.TIMED_OUT
    assert outcome.summary is not None
    assert outcome.summary.steps == 1
