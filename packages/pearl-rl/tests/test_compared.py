"""Simulations side by side, as wide as whoever looks has room for."""

import re
from dataclasses import replace

import pytest

from pearl_rl.cli.compared import Row, print_rows

ROW = Row(
    name="pearl", throughput=7000.0, spread=12.0, steps=3.0, step_s=800.0, rollout_s=700.0, training_s=84.0, wape=0.2,
    gpu_s=39_000.0, borrows=2.0, expansions=5.0, switches=6.0,
)  # fmt: skip
LONG = replace(ROW, name="integration.examples.half_prefill:policy", throughput=3500.0)


def test_a_file_gets_every_column_and_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows("what if", [ROW, LONG], ROW, bars=True)
    out = capsys.readouterr().out
    for word in ("of first", "prediction off", "GPU-s", "expansions", "throughput", LONG.name, "7,000 ± 12", "0.500"):
        assert word in out
    assert re.search(r"█{24}\n|█{24} *\n", out)


@pytest.mark.parametrize("columns", [80, 100, 140, 200])
def test_a_terminal_gets_lines_that_fit(columns: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    print_rows("what if", [ROW, LONG], ROW, bars=True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= columns
    assert "tokens/s" in " ".join(lines)
    assert "switches" in " ".join(lines)
    assert ("GPU-s" in " ".join(lines)) == (columns >= 200)
