"""`pearl-rl report`: a run's folder as one page, and its plots as SVG and PNG files."""

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pearl_rl.errors import CommandError, ExitCode
from pearl_rl.report.whole_file import whole_file

if TYPE_CHECKING:
    from pearl_rl.report.run_record import RunRecord

PAGE = "report.html"


def write_report(run_dirs: Sequence[Path], *, out: Path | None, plots: Path | None, as_json: bool) -> ExitCode:
    """Write the page of one run, or one that compares several, to `out` (default: `report.html` in the first folder).

    `plots` is a folder that gets each plot as an SVG and a PNG file. Raises `CommandError`.
    """
    from pearl_rl.report.page import comparison_page, run_page
    from pearl_rl.report.run_record import read_run

    runs = [read_run(path) for path in run_dirs]
    page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs, f"{len(runs)} runs compared")
    target = out or run_dirs[0] / PAGE
    write_text(target, page)
    drawn = [] if plots is None else _write_plots(runs, plots)
    if as_json:
        print(json.dumps({"page": str(target), "plots": [str(path) for path in drawn]}))
        return ExitCode.OK
    print(f"wrote {target} ({len(page.encode()) / 1024:.0f} KiB); open it in a browser")
    if plots is not None:
        print(f"wrote {len(drawn) // 2} plots to {plots}, each as SVG and as PNG")
    return ExitCode.OK


def _write_plots(runs: "Sequence[RunRecord]", folder: Path) -> list[Path]:
    """Each plot of each run as an SVG and a PNG file; returns the files."""
    from pearl_rl.report.standalone import standalone_plots

    files = []
    for run in runs:
        prefix = f"{run.path.resolve().name}-" if len(runs) > 1 else ""
        for name, text in standalone_plots(run):
            for suffix in (".svg", ".png"):
                files.append(folder / f"{prefix}{name}{suffix}")
                write_plot(files[-1], text)
    return files


def write_plot(path: Path, svg: str) -> None:
    """Write a plot, as PNG where the file's name ends so, else as SVG. Raises `CommandError` as `write_text` does."""
    if path.suffix.lower() != ".png":
        write_text(path, svg)
        return
    from pearl_rl.report.raster import png

    _write(path, png(svg))


def write_text(path: Path, text: str) -> None:
    """Write the whole file or none of it. Raises `CommandError` where it cannot be written."""
    _write(path, text.encode("utf-8"))


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_bytes(content)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def check_target(path: Path) -> None:
    """Find out before the work whether `path` can be written after it. Raises `CommandError` where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=path.parent).close()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError | ValueError) -> CommandError:
    reason = error.strerror if isinstance(error, OSError) else error
    return CommandError(f"{path}: cannot be written ({reason}); choose another file")


def write_trace(run_dir: Path, out: Path, detail: str, *, as_json: bool) -> ExitCode:
    """Write the trace of a run. Raises `CommandError`."""
    from pearl_rl.report.timeline import Detail, write_timeline

    if detail not in list(Detail):
        raise CommandError(f"--detail {detail}: is none of {', '.join(Detail)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        count = write_timeline(run_dir, out, Detail(detail))
    except (OSError, ValueError) as error:
        raise _unwritable(out, error) from None
    if as_json:
        print(json.dumps({"trace": str(out), "events": count}))
    else:
        print(f"wrote {out} ({count:,} events); open it at ui.perfetto.dev")
    return ExitCode.OK
