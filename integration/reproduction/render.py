"""Writes `integration/REPRODUCTION.md` from `rows.json` and `causes.toml` beside this file, and TideRL's part of it
from `tiderl.json` and `tiderl_causes.toml`.

`python integration/reproduction/render.py --run [--jobs N]` first simulates everything anew; `--run tiderl` only that
paper. A test compares the page with what this makes of the files, and cheap rows with what the simulator says now.
"""

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "REPRODUCTION.md"
Row = Mapping[str, Any]


def rows(file: str = "rows.json") -> list[Row]:
    """The rows as they were computed last."""
    found: list[Row] = json.loads((HERE / file).read_text(encoding="utf-8"))
    return found


def causes(file: str = "causes.toml") -> list[Mapping[str, Any]]:
    """Likely causes of misses: each with `rows` (`id: name` of every row that it explains) and `text`."""
    found: list[Mapping[str, Any]] = tomllib.loads((HERE / file).read_text(encoding="utf-8"))["cause"]
    return found


def document() -> str:
    """The whole file: PEARL's page, and TideRL's after it."""
    return page(rows(), causes()) + "\n" + part(rows("tiderl.json"), causes("tiderl_causes.toml"))


def title(row: Row) -> str:
    """How a row is called in `causes.toml`."""
    return f"{row['id']}: {row['name']}"


def missed(found: Sequence[Row]) -> list[str]:
    """The titles of the rows that are not met."""
    return [title(row) for row in found if not row["ok"]]


def page(found: Sequence[Row], explained: Sequence[Mapping[str, Any]]) -> str:
    """The whole page. Raises `ValueError` where a miss has no cause, or a cause explains what is no miss."""
    _explained(found, explained)
    counts = {
        use: (sum(r["ok"] for r in found if r["use"] == use), sum(r["use"] == use for r in found))
        for use in ("calibrate", "predict")
    }
    lines = [
        "# What the paper measured, and what the simulation gives",
        "",
        "Made by `pearl-rl reproduce all`; written by `integration/reproduction/render.py`. Do not edit.",
        "",
        f"Calibrated rows met: {counts['calibrate'][0]} of {counts['calibrate'][1]} (within 5 %, gains within 5 points "
        "of the base). "
        f"Predicted rows met: {counts['predict'][0]} of {counts['predict'][1]} (gains within 10 points and with the "
        "paper's sign, ratios within 15 %, texts equal). Parameters and their origins: "
        "`packages/pearl-rl/src/pearl_rl/simulation/data/parameters.json`; none was set by a predicted row.",
        "",
        "Each run has one seed unless `--seeds` says more, so a gain moves by a few points from seed to seed. What an "
        "iteration with prefill costs besides kernels is charged on every worker; charged at phase changes of "
        "colocated workers only, it fits the calibrated rows as well and met 13 of 20 rows of F5, 12 of 24 of F7 and "
        "2 of 6 of F2c, about as many as this.",
        "",
        "| target | what | use | paper | ours | error | met |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    return _closed(lines, found, explained, "## Misses and their likely causes")


def part(found: Sequence[Row], explained: Sequence[Mapping[str, Any]]) -> str:
    """TideRL's part, after PEARL's. Raises as `page`."""
    _explained(found, explained)
    lines = [
        "# TideRL, and all of it with PEARL and Prorsa",
        "",
        f"Made by `pearl-rl reproduce tiderl`. Rows met: {sum(row['ok'] for row in found)} of {len(found)}. "
        "The goodput rows are no figures of a paper: they say what continuous injection should gain over waiting for "
        "whole batches on PEARL's trace, at staleness bounds of 1 and 4.",
        "",
        "| target | what | use | wanted | ours | error | met |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    return _closed(lines, found, explained, "## TideRL's misses and their likely causes")


def _explained(found: Sequence[Row], explained: Sequence[Mapping[str, Any]]) -> None:
    misses = missed(found)
    named = [name for cause in explained for name in cause["rows"]]
    if sorted(named) != sorted(misses):
        lacking, extra = set(misses) - set(named), set(named) - set(misses)
        raise ValueError(f"misses without a cause: {sorted(lacking)}; causes of what is met: {sorted(extra)}")


def _closed(lines: Sequence[str], found: Sequence[Row], explained: Sequence[Mapping[str, Any]], heading: str) -> str:
    out = [*lines, *(_line(row) for row in found), "", heading, ""]
    for cause in explained:
        out += [*(f"- {name}" for name in cause["rows"]), "", cause["text"].strip(), ""]
    return "\n".join(out).rstrip() + "\n"


def _line(row: Row) -> str:
    error = ""
    if row["error"] is not None:
        error = f"{row['error']:+.1f} points" if row["unit"] in ("points", "within") else f"{row['error']:+.1%}"
    paper = f"> {_text(row['paper'])}" if row.get("at_least") else _text(row["paper"])
    met = "yes" if row["ok"] else "no"
    return f"| {row['id']} | {row['name']} | {row['use']} | {paper} | {_text(row['ours'])} | {error} | {met} |"


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def main() -> None:
    """Write the page; with `--run` the rows first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run", nargs="?", const="all", choices=("all", "tiderl"), help="simulate anew: all, or a part"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    if arguments.run:
        from pearl_rl.simulation.experiments.bench import Bench
        from pearl_rl.simulation.experiments.registry import reproduce

        files = {"all": "rows.json", "tiderl": "tiderl.json"}
        for target in files if arguments.run == "all" else [arguments.run]:
            found = [row.to_json() for row in reproduce([target], Bench(arguments.jobs))]
            (HERE / files[target]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
