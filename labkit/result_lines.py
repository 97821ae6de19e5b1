"""How each test ended, one line of JSON each, written by pytest for whoever started it.

In a process of its own: `pytest -p labkit.result_lines --result-lines FILE`. In this one:
`pytest.main(…, plugins=[ResultLines(file)])`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--result-lines`."""
    parser.addoption("--result-lines", type=Path, help="the file that gets a line of JSON for each event")


def pytest_configure(config: pytest.Config) -> None:
    """Begins to write if a file is named."""
    if path := config.getoption("--result-lines"):
        file = path.open("w", encoding="utf-8")
        config.add_cleanup(file.close)
        config.pluginmanager.register(ResultLines(file), "result-lines")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events in a file that may still be written to.

    A line that was being written when the process was ended is left out, with all that follows.

    Args:
        path: what `ResultLines` or `write_event` wrote.
    """
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def write_event(file: TextIO, **event: Any) -> None:
    """Adds an event, at once: its writer may be ended at any time."""
    file.write(json.dumps(event) + "\n")
    file.flush()


class ResultLines:
    """A pytest plugin. Events have a `kind`: "start" with the name of a test function, and "report".

    A report tells `name`, `task`, `outcome`, `text` (what pytest would print), `message` (the failure alone) and
    `not_attempted`.

    Args:
        file: open for writing.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._tasks: dict[str, int | None] = {}

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Before a test."""
        marker = item.get_closest_marker("task")
        self._tasks[item.nodeid] = marker.args[0] if marker else None
        write_event(self._file, kind="start", name=_function(item.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each phase of a test."""
        if report.when != "call" and report.passed:
            return
        write_event(
            self._file,
            kind="report",
            name=_function(report.nodeid),
            task=self._tasks.get(report.nodeid),
            outcome=report.outcome,
            text=str(report.longrepr or ""),
            message=_message(report),
            not_attempted=bool(getattr(report, "not_attempted", None)),
        )


def _function(nodeid: str) -> str:
    """The test function in a node id."""
    return nodeid.rpartition("::")[2].partition("[")[0]


def _message(report: pytest.TestReport) -> str:
    """The failure without its traceback, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr or "").removeprefix("AssertionError: ")
