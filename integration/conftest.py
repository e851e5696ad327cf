"""What holds for every session of this folder: where PEARL_NO_SKIPS is set, a test that did not run is a failure."""

import os

import pytest


def pytest_sessionfinish(session, exitstatus):
    """Sessions that bring all that their tests need set it: a skipped test there means that something is missing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("PEARL_NO_SKIPS") or reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    skipped = len(reporter.stats.get("skipped", ()))
    if skipped or not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say so."""
    skipped = terminalreporter.stats.get("skipped", ())
    if os.environ.get("PEARL_NO_SKIPS") and skipped:
        terminalreporter.write_line(f"{len(skipped)} tests were skipped, and none may be here (PEARL_NO_SKIPS)")
        for report in skipped:
            terminalreporter.write_line(f"  {report.nodeid}: {report.longrepr[-1]}")
