"""Mistakes that a newcomer makes with folders, files and arguments end in one line that says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pearl_rl.cli.app import app
from pearl_rl.cli.compared import Row, print_rows
from pearl_rl.errors import ExitCode


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate"], "(see pearl-rl simulate --help)"),
        (["import", "verl"], "(see pearl-rl import --help)"),
        (["workers", "cordon"], "(see pearl-rl workers cordon --help)"),
        (["pin", "runs/nope"], "'runs/nope' is not like '2P3D' or '4C'; a run folder is given by --run RUN_DIR"),
        (
            ["simulate", "paper-segment1", "--record", "a_file"],
            "a_file/pearl-0: cannot be made (Not a directory); choose",
        ),
        (["simulate", "job.toml"], "it is a setting of `pearl-rl train`, and this must be a scenario"),
        (["simulate", "job.toml", "--full"], "--full: says more in JSON only; give --json too"),
        (
            ["doctor", "--address", "auto"],
            "--address: is about a Ray cluster; name the job that it is for by --cluster",
        ),
        (["doctor", "--set", "run.seed=1"], "--set: is about a Ray cluster"),
        (["plan", "--model", "m", "--gpu", "g", "--workers", "eight"], "--workers eight: must be a valid integer (see"),
        (["dashboard", "--port", "99999"], "--port 99999: must be less than or equal to 65535 (see"),
        (["workers", "cordon", "four"], "WORKER four: must be a valid integer (see pearl-rl workers cordon --help)"),
        (["config"], "Missing command. There are: show, validate, schema, diff (see pearl-rl config --help)"),
        (["trian"], "Did you mean 'train'? (see pearl-rl --help)"),
        (["what-if", "runs/nope", "--vary", "run.steps=1,2"], "runs/nope: does not exist; give the folder of a run"),
        (["replay", "runs/nope"], "runs/nope: does not exist; give the folder of a run of `pearl-rl train`"),
        (["replay-journal", "runs/nope"], "runs/nope: does not exist; give the folder of a run"),
        (["resume", "runs/nope"], "runs/nope: does not exist"),
        (["replay-journal", "simulated"], "simulated: is a recorded simulation"),
        (["replay", "simulated"], "`pearl-rl status`, `report` and `timeline` read both"),
        (["simulate", "paper-segment1", "--report", "simulated"], "simulated: cannot be written"),
        (["simulate", "paper-segment1", "--policy", "pearl,roll,pearl"], "names pearl twice; --seeds repeats each"),
        (["simulate", "paper-segment1", "--set", "workload=5"], "paper-segment1: workload: is a section; set its keys"),
        (["what-if", "paper-segment1", "--vary", "a.b=1", "--vary", "a.b=2"], "--vary a.b: is given twice; give all"),
        (["what-if", "paper-segment1", "--vary", "run.steps=1", "--plot", "simulated"], "simulated: cannot be written"),
        (["what-if", "paper-segment1", "--vary", "a.b=1:1e300:1"], "gives 1000000000"),
        (["replay", "simulated", "--report", "a_file/x.html"], "a_file/x.html: cannot be written"),
        (["status", "n" * 300], f"{'n' * 59}…: cannot be used (File name too long)"),
        (["report", "a_file/run"], "a_file/run: "),
        (["import", "verl", "empty.yaml"], "empty.yaml: holds no key"),
        (["simulate", "paper-segment1", "--report", "a_file/x.html"], "a_file/x.html: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_with_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "scenario.json").write_text("{}")
    (tmp_path / "a_file").write_text("")
    (tmp_path / "empty.yaml").write_text("{}\n")
    (tmp_path / "job.toml").write_text("[train]\nlearning_rate = 1e-4\n")
    monkeypatch.chdir(tmp_path)
    assert app(arguments, prog_name="pearl-rl", standalone_mode=False) == ExitCode.CONFIG
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert says in err
    assert len(err) < 500
    assert sorted(os.listdir()) == ["a_file", "empty.yaml", "job.toml", "simulated"]


def test_records_that_have_no_room_are_told_of_by_their_own_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pearl-0").mkdir()
    (tmp_path / "pearl-0" / "x").write_text("")
    assert app(["simulate", "paper-segment1", "--record", str(tmp_path)], standalone_mode=False) == ExitCode.CONFIG
    assert "exists and is not empty; choose another --record, or remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["config", "show"], ["config", "show", "--json"], ["plan", "--help"], ["nope"]]
    + [["plan", "--model", "qwen3-8b", "--gpu", "h800", "--workers", "8", *more] for more in ([], ["--json"])],
)
def test_an_output_that_takes_nothing_is_one_line_and_an_exit_code(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        code = app(words, standalone_mode=False)
        # What is left goes nowhere, not to a second complaint at the end of the process.
        full.flush()
    _, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    if words == ["nope"]:
        assert code == ExitCode.CONFIG
    else:
        assert (code, err) == (
            ExitCode.PARTIAL,
            "pearl-rl: standard output cannot be written (No space left on device)\n",
        )


PEARL_RL = [sys.executable, "-m", "pearl_rl"]


def test_who_reads_no_further_is_told_nothing_more() -> None:
    words = [*PEARL_RL, "config", "show"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (ExitCode.PARTIAL, "")


def test_an_output_that_is_closed_from_the_start_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert app(["config", "show"], standalone_mode=False) == ExitCode.OK


def test_an_output_without_arrows_gets_question_marks() -> None:
    words = [*PEARL_RL, "plan", "--model", "qwen3-8b", "--gpu", "h800", "--workers", "2"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True)
    assert b"?" in done.stdout
    assert done.stderr == b""


def test_ctrl_c_is_one_line_and_ended_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pearl_rl.cli.config.show", interrupted)
    assert app(["config", "show"], standalone_mode=False) == ExitCode.PARTIAL
    assert capsys.readouterr().err == "pearl-rl: stopped by Ctrl-C\n"


def test_means_of_counts_are_printed_to_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        name="x",
        throughput=1.0,
        spread=0.1,
        steps=1,
        step_s=1.0,
        rollout_s=1.0,
        training_s=1.0,
        wape=None,
        gpu_s=None,
        borrows=9,
        expansions=41 / 3,
        switches=2.0,
    )
    print_rows("title", [row], row)
    assert capsys.readouterr().out.split()[-3:] == ["9", "13.7", "2"]
