"""`python -m pearl_planner decide`, and the README's example."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pearl_planner.__main__ import main

GOOD = ["decide", "--model", "qwen3-8b", "--gpu", "h800", "--tp", "2", "--workers", "8"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as leaving:
        code = int(str(leaving.code))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_holds_the_selection_all_candidates_and_what_decided(capsys):
    code, out, _ = run(capsys, *GOOD[:-1], "2", "--makespan", "printed", "--json")
    answer = json.loads(out)
    assert code == 0
    assert (answer["selected"], answer["reason"], answer["decided_by"]) == ("2C", "initial", ["decode_kv"])
    assert [c["configuration"] for c in answer["candidates"]] == ["2C", "1P1D"]
    worse = answer["candidates"][1]
    assert worse["feasible"] is False
    assert worse["terms"]["total_s"] == worse["makespan_s"]
    assert answer["notes"] == ["workload and platform: bundled profile swe-32k"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_output_that_takes_nothing_is_one_line(capsys, monkeypatch, form):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        code = main((*GOOD, *form))
        full.flush()
    assert code == 5
    assert capsys.readouterr().err == "error: standard output cannot be written (No space left on device)\n"


def test_the_table_shows_every_candidate(capsys):
    code, out, _ = run(capsys, *GOOD, "--current", "4P4D")
    assert code == 0
    assert all(f"{p}P{8 - p}D" in out for p in range(1, 8))
    assert "within_hysteresis" in out


def test_infeasible_is_three(capsys):
    code, out, _ = run(capsys, *GOOD[:-1], "2", "--mode", "disaggregation")
    assert code == 3
    assert "breaks decode_kv" in out


def test_another_model_gets_a_roofline_and_is_told_so(capsys):
    code, out, _ = run(capsys, "decide", "--model", "qwen3-30b-a3b", "--gpu", "h100", "--tp", "2", "--workers", "4")
    assert code == 0
    assert "analytic roofline" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--tp": "3"}, "tp = 3 does not divide"),
        ({"--tp": "0"}, "--tp: 0: must be a whole number of at least 1"),
        ({"--model": "no-such-model"}, "no model 'no-such-model'"),
        ({"--gpu": "h801"}, "did you mean 'h800'?"),
        ({"--workers": "-4"}, "--workers: -4: must be a whole number"),
        ({"--workers": "0"}, "--workers: 0: must be a whole number"),
        ({"--workers": "nan"}, "--workers: nan: must be a whole number"),
        ({"--profile": "none"}, "no profile 'none'"),
        ({"--current": "3P"}, "configuration '3P' is not like"),
        ({"--current": "0P2D"}, "prefill needs decode"),
        ({"--mode": "both"}, "invalid choice: 'both'"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, change, message):
    arguments = dict(zip(GOOD[1::2], GOOD[2::2], strict=True)) | change
    code, out, err = run(capsys, "decide", *(part for pair in arguments.items() for part in pair))
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "pearl_planner", *GOOD, "--json"], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["selected"] == "3P5D"


def test_the_readme_s_examples_run(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    decision, guest = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(decision.splitlines()) <= 10
    exec(compile(decision, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.startswith("4P9D best 73.")
    assert ">  4P9D" in out
    exec(compile(guest, "README.md", "exec"), {})
    selected, reason = capsys.readouterr().out.splitlines()
    assert selected == "8C"
    assert reason.startswith("48/64 x (")
