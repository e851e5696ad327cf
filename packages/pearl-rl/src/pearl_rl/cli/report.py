"""`pearl-rl report`: a run's folder as one page, and its plots as SVG files."""

from collections.abc import Sequence
from pathlib import Path

from pearl_rl.errors import CommandError, ExitCode

PAGE = "report.html"


def write_report(run_dirs: Sequence[Path], *, out: Path | None, plots: Path | None) -> ExitCode:
    """Write the page of one run, or one that compares several, to `out` (default: `report.html` in the first folder).

    `plots` is a folder that gets each plot as an SVG file. Raises `CommandError`.
    """
    from pearl_rl.report.page import comparison_page, run_page
    from pearl_rl.report.run_record import read_run

    runs = [read_run(path) for path in run_dirs]
    page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs, f"{len(runs)} runs compared")
    target = out or run_dirs[0] / PAGE
    write_text(target, page)
    print(f"wrote {target} ({len(page) / 1024:.0f} KiB)")
    if plots is not None:
        from pearl_rl.report.standalone import standalone_plots

        for run, path in zip(runs, run_dirs, strict=True):
            prefix = f"{path.resolve().name}-" if len(runs) > 1 else ""
            for name, text in standalone_plots(run):
                write_text(plots / f"{prefix}{name}.svg", text)
        print(f"wrote plots to {plots}")
    return ExitCode.OK


def write_text(path: Path, text: str) -> None:
    """Write a file whole. Raises `CommandError` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"{path}: cannot be written ({reason}); choose another file") from None


def write_trace(run_dir: Path, out: Path, detail: str) -> ExitCode:
    """Write the trace of a run. Raises `CommandError`."""
    from pearl_rl.report.timeline import Detail, write_timeline

    if detail not in list(Detail):
        raise CommandError(f"--detail {detail}: is none of {', '.join(Detail)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        count = write_timeline(run_dir, out, Detail(detail))
    except OSError as error:
        raise CommandError(f"{out}: cannot be written ({error.strerror}); choose another file") from None
    print(f"wrote {out} ({count:,} events); open it at ui.perfetto.dev")
    return ExitCode.OK
