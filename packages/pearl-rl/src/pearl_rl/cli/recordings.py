"""Run folders of simulations, kept or made only for a report."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pearl_rl.run_folder import RunFolder

if TYPE_CHECKING:
    from pearl_rl.report.run_record import RunRecord
    from pearl_rl.simulation.outcome import SimulationResult
    from pearl_rl.simulation.scenario import Scenario


class Recordings:
    """Records each simulation where a report or the records themselves are wanted."""

    def __init__(self, keep: Path | None, report: Path | None) -> None:
        """Raises `CommandError` where `report` cannot be written, before anything is simulated for it."""
        if report is not None:
            from pearl_rl.cli.report import check_target

            check_target(report)
        self._keep = keep
        self._report = report
        self._runs: list[RunRecord] = []

    def run(
        self,
        scenario: "Scenario",
        simulate: "Callable[[Scenario, RunFolder | None], SimulationResult]",
        name: str = "",
    ) -> "SimulationResult":
        """Run one simulation; `name` is its folder's, by default policy and seed.

        Raises `CommandError` where the folder is not empty.
        """
        if self._keep is None and self._report is None:
            return simulate(scenario, None)
        if self._keep is not None:
            return self._recorded(
                scenario, simulate, self._keep / (name or f"{scenario.policy.name}-{scenario.run.seed}")
            )
        with tempfile.TemporaryDirectory(prefix="pearl-rl-") as folder:
            return self._recorded(scenario, simulate, Path(folder) / "run")

    def _recorded(
        self,
        scenario: "Scenario",
        simulate: "Callable[[Scenario, RunFolder | None], SimulationResult]",
        path: Path,
    ) -> "SimulationResult":
        with RunFolder.create_simulation(scenario.model_dump(), path) as folder:
            result = simulate(scenario, folder)
            folder.write_summary(result.to_json(full=False))
        if self._report is not None:
            from pearl_rl.report.run_record import read_run

            self._runs.append(read_run(path))
        return result

    def finish(self, title: str) -> None:
        """Write the report. Raises `CommandError` where it cannot be written."""
        if self._report is None:
            return
        from pearl_rl.cli.report import write_text
        from pearl_rl.report.page import comparison_page, run_page

        page = run_page(self._runs[0]) if len(self._runs) == 1 else comparison_page(self._runs, title)
        write_text(self._report, page)
