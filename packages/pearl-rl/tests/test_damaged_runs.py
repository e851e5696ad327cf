"""A folder that is not quite a run's ends in one line that names the file; figures that are no numbers are shown."""

import asyncio
import json
import math
import re
from pathlib import Path

import pytest

from pearl_rl.cli.app import app
from pearl_rl.errors import ExitCode
from pearl_rl.live.server import Dashboard
from pearl_rl.live.testing import OperableJob
from pearl_rl.observer import StepRecord
from pearl_rl.report.whole_file import whole_file
from pearl_rl.run_folder import joined_decisions


def step(number: int, **figures: float) -> StepRecord:
    return StepRecord(
        step=number,
        steps=3,
        now_s=4.0 * number,
        duration_s=4.0,
        generated_tokens=500,
        trained_tokens=500,
        rollout_s=3.0,
        **{"reward_mean": 0.5, "loss": 0.1, "gradient_norm": 0.2, **figures},
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps, the last of which diverged and was predicted to take for ever."""

    async def main() -> None:
        async with OperableJob(tmp_path / "run") as job:
            job.record_step(step(1))
            job.record_step(step(2, gradient_norm=math.inf))
            job.record_step(
                step(3, loss=math.nan, gradient_norm=math.nan, reward_mean=math.nan, predicted_rollout_s=math.inf)
            )

    asyncio.run(main())
    return tmp_path / "run"


def say(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = app([str(word) for word in words], standalone_mode=False)
    found = capsys.readouterr()
    return code, found.out, found.err


def commands(run: Path) -> list[tuple[object, ...]]:
    plan = run.parent / "plan.json"
    plan.write_text('{"target": "2P2D"}')
    return [
        ("status", run),
        ("status", run, "--json"),
        ("top", run, "--json"),
        ("workers", "list", "--run", run),
        ("apply", plan, "--run", run, "--dry-run"),
        ("report", run, "--out", run.parent / "report.html"),
        ("timeline", run, "--out", run.parent / "trace.json"),
    ]


READS = {"metrics.jsonl": {0, 1, 2, 3, 5, 6}, "table.jsonl": {0, 1, 2, 3, 4, 5, 6}, "requests.jsonl": {5, 6}}
"""Which of `commands` read a file."""


@pytest.mark.parametrize("file", sorted(READS))
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ('{"x":\n', r"run/{file}: line \d+ is no JSON object \(Expecting value.*\); the file is damaged"),
        ("[1]\n", r"run/{file}: line \d+ is no JSON object; the file is damaged"),
        ("[" * 100_000 + "\n", r"run/{file}: line \d+ is no JSON object \(maximum recursion"),
        ("{}\n", r"run: cannot be read as a run \(KeyError\('\w+'\)\); is a file of it damaged\?"),
        (None, r"run/{file}: cannot be read \(Is a directory\)"),
    ],
    ids=["cut off", "a list", "deep", "empty", "a folder"],
)
def test_a_damaged_file_is_one_line_that_names_it_and_nothing_is_written(
    run: Path, capsys: pytest.CaptureFixture[str], file: str, what: str | None, says: str
) -> None:
    if what is None:
        (run / file).unlink(missing_ok=True)
        (run / file).mkdir()
    else:
        with (run / file).open("a") as written:
            written.write(what)
    (run.parent / "trace.json").write_text("of before")
    for number, words in enumerate(commands(run)):
        if number in READS[file]:
            code, out, error = say(capsys, *words)
            assert (code, out, error.count("\n")) == (ExitCode.CONFIG, "", 1), (words, error)
            assert re.search(says.replace("{file}", re.escape(file)), error), (words, error)
    assert (run.parent / "trace.json").read_text() == "of before"
    assert sorted(path.name for path in run.parent.iterdir()) == ["plan.json", "run", "trace.json"]


@pytest.mark.parametrize(
    ("file", "was", "becomes"),
    [("metrics", '"generated_tokens":500', '"generated_tokens":1e999'), ("table", '"groups":[]', '"groups":[{}]')],
)
def test_a_value_of_another_kind_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], file: str, was: str, becomes: str
) -> None:
    path = run / f"{file}.jsonl"
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes))
    code, out, error = say(capsys, "status", run)
    assert (code, out, error.count("\n")) == (ExitCode.CONFIG, "", 1)
    assert f"{run}: cannot be read as a run (" in error


def test_a_summary_that_is_none_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text("5")
    code, _, error = say(capsys, "report", run)
    assert (code, error) == (ExitCode.CONFIG, f"pearl-rl: {run}/summary.json: is no JSON object; the file is damaged\n")


@pytest.mark.parametrize("control", ['{"url": 5}', '{"token": "x"}', "[]"])
def test_where_a_run_listens_may_be_damaged_too(run: Path, capsys: pytest.CaptureFixture[str], control: str) -> None:
    (run / "control.json").write_text(control)
    code, _, error = say(capsys, "unpin", "--run", run)
    assert (code, error.count("\n")) == (ExitCode.CONFIG, 1)
    assert "cannot be read as a run (" in error


def test_a_dashboard_says_what_is_damaged_and_goes_on_once_it_is_mended(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    whole = metrics.read_text()

    async def main() -> list[dict[str, object]]:
        views = Dashboard(run)._views()
        metrics.write_text(whole + "[1]\n")
        first = json.loads(await anext(views))
        metrics.write_text(whole)
        return [first, json.loads(await anext(views))]

    damaged, mended = asyncio.run(main())
    assert damaged == {"error": f"{metrics}: line 4 is no JSON object; the file is damaged, take the line out"}
    assert mended["completed"] == 3


def test_training_that_diverged_is_shown_and_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text("{}")
    for words in commands(run):
        code, _, error = say(capsys, *words)
        assert (code, error) == (ExitCode.OK, ""), words
    _, out, _ = say(capsys, "status", run, "--json")
    assert [one["reward"] for one in json.loads(out)["history"]] == [0.5, 0.5, None]
    page = (run.parent / "report.html").read_text()
    assert "Loss or gradient norm is no finite number twice, first at step 2: training has diverged." in page
    data = re.search(r'class="data">(.*?)</script>', page)
    assert data is not None
    assert [one["reward"] for one in json.loads(data[1])["steps"]] == [0.5, 0.5, None]


def test_what_is_no_file_is_written_as_it_is_and_a_link_stays_one(tmp_path: Path) -> None:
    """A report to `/dev/null` or `/dev/stdout` does not put a file there."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    with whole_file(link) as part:
        part.write_text("after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    with whole_file(Path("/dev/null")) as part:
        assert part == Path("/dev/null")
    with pytest.raises(UnicodeEncodeError), whole_file(target) as part:
        part.write_text("half \ud800", encoding="utf-8")
    assert target.read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_what_a_step_took_is_told_of_its_decision_also_where_one_before_it_was_taken_out() -> None:
    decisions: list[dict[str, object]] = [{"number": number, "decision": {}} for number in range(3)]
    measured = [{"number": number, "step": number} for number in range(3)]
    found = joined_decisions([*decisions[:1], *decisions[2:], *measured])
    assert [(line["number"], [one["step"] for one in line["measured"]]) for line in found] == [(0, [0]), (2, [2])]
