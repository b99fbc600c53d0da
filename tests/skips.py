"""A pytest plugin: every test that is skipped or expected to fail has a row in SKIPS.md, or the run fails.

A row is `| reason | where | why |`. The reason is the text given to pytest, in backticks, with `*` for what varies.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

ROWS = Path(__file__).with_name("SKIPS.md")


def read_rows(text: str) -> list[tuple[str, str]]:
    """Return (reason pattern, where) for each place that a row of the table names."""
    row = r"^\|\s*`([^`]+)`\s*\|\s*(`[^`]+`(?:, `[^`]+`)*)\s*\|.*\S.*\|\s*$"
    return [
        (reason, path)
        for reason, where in re.findall(row, text, flags=re.M)
        for path in re.findall(r"`([^`]+)`", where)
    ]


def has_row(reason: str, patterns: list[str]) -> bool:
    """Whether one of the patterns describes the whole reason; only `*` is special."""
    return any(
        re.fullmatch(fnmatch.translate(pattern.replace("[", "[[]").replace("?", "[?]")), reason) for pattern in patterns
    )


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason that was given to pytest.skip, skipif or xfail."""
    if hasattr(report, "wasxfail"):
        return report.wasxfail.removeprefix("reason: ")
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


class SkipLedger:
    """Collects what was skipped in this run; with xdist it lives in the controller, which sees every report."""

    def __init__(self, rows: Path) -> None:
        self.patterns = [pattern for pattern, _ in read_rows(rows.read_text(encoding="utf-8"))]
        self.unknown: dict[str, list[str]] = {}

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Remember the report if it is a skip without a row."""
        if report.skipped and not has_row(reason_of(report), self.patterns):
            self.unknown.setdefault(reason_of(report), []).append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of a test skipped by mark or while it ran."""
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take note of a module skipped as a whole."""
        self.note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that would pass otherwise."""
        if self.unknown and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which reasons lack a row."""
        if not self.unknown:
            return
        terminalreporter.section("skips without a row in tests/SKIPS.md", red=True)
        for reason, tests in sorted(self.unknown.items()):
            terminalreporter.write_line(f"{reason!r}: {len(tests)} skipped, the first is {tests[0]}")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the ledger in the process that sees all reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipLedger(ROWS), "locant-skips")
