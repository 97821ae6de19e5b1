"""The tests of one task, run by pytest in a process of its own.

A notebook's kernel keeps what it has imported. A fresh process reads the student's files as they are now, and can be
ended when their code does not end by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from labkit.implementation import implementation_folder
from labkit.manifest import Manifest, Task
from labkit.result_lines import read_events

_POLL_SECONDS = 0.1
_TAIL_CHARACTERS = 2000


class Outcome(Enum):
    """How a test function ended; of several cases the worst counts, which is the one that stands last here."""

    PASSED = "passed"
    SKIPPED = "not verified here"
    NOT_WRITTEN = "not written yet"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class FunctionResult:
    """One test function.

    Args:
        name: as the manifest lists it.
        outcome: of all its cases together.
        message: what the first case with this outcome said; empty if it passed.
        text: the same with its traceback.
    """

    name: str
    outcome: Outcome
    message: str = ""
    text: str = ""


@dataclass(frozen=True)
class TaskRun:
    """The results of one task's tests, in the manifest's order."""

    manifest: Manifest
    task: Task
    impl: str
    results: tuple[FunctionResult, ...]

    @property
    def passed(self) -> int:
        """Test functions all of whose cases passed."""
        return sum(result.outcome is Outcome.PASSED for result in self.results)

    @property
    def points(self) -> float:
        """Each test function earns an equal share of the task's points."""
        return self.task.points * self.passed / len(self.results)

    @property
    def done(self) -> bool:
        """Whether every test passed."""
        return self.passed == len(self.results)

    @property
    def not_written(self) -> bool:
        """Whether nothing was tried: what did not pass ended at an untouched stub."""
        others = [result.outcome for result in self.results if result.outcome is not Outcome.PASSED]
        return self.passed == 0 and Outcome.NOT_WRITTEN in others and Outcome.FAILED not in others

    @property
    def first_problem(self) -> FunctionResult | None:
        """The first test that failed or met a stub, or None."""
        return next((r for r in self.results if r.outcome not in (Outcome.PASSED, Outcome.SKIPPED)), None)


class CheckError(RuntimeError):
    """The tests could not be run at all; the text is what pytest said."""


def run_task(
    manifest: Manifest,
    task: Task,
    impl: str = "labs",
    *,
    seconds: float = 600.0,
    tell: Callable[[int], None] = lambda done: None,
) -> TaskRun:
    """Runs the tests of a task.

    Args:
        manifest: the lab.
        task: one of its tasks.
        impl: whose code: "labs", "solutions" or a folder of this workbook.
        seconds: after which the tests are ended; the one then running has failed.
        tell: called now and then with the number of test cases that have ended.

    Raises:
        ValueError: `impl` names nothing that can be used.
        CheckError: pytest could not run the suite.
    """
    folder = implementation_folder(manifest, impl)
    root = manifest.folder.parent.parent
    with tempfile.TemporaryDirectory(prefix="check-") as scratch:
        lines, log = Path(scratch) / "results.jsonl", Path(scratch) / "output.txt"
        lines.touch()
        command = [sys.executable, "-m", "pytest", *map(str, manifest.test_files(task.number)), "-q", "--tb=short"]
        command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "labkit.pytest_plugin"]
        command += ["-p", "labkit.result_lines", "--result-lines", str(lines)]
        # A path is made absolute, since pytest starts in another folder than the notebook.
        command += ["--impl", impl if impl in ("labs", "solutions") else str(folder), "--task", str(task.number)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=root, env=_environment(root), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            ended = _wait(process, seconds, lambda: tell(sum(e["kind"] == "report" for e in read_events(lines))))
        finally:
            _end(process)
        # pytest's own codes: 0 all passed, 1 some failed.
        if ended and process.returncode not in (0, 1):
            said = log.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL_CHARACTERS:]
            raise CheckError(f"the tests of task {task.number} could not be run; pytest says:\n{said}")
        late = None if ended else f"not ended after {seconds:g} s: look for a loop without end, or for work done twice"
        return TaskRun(manifest, task, impl, tuple(_results(task, read_events(lines), late)))


def _environment(root: Path) -> dict[str, str]:
    """This process's environment without what would bend the run: the kernel's or the user's own settings."""
    unwanted = ("IMPL", "TASK", "PYTEST_ADDOPTS", "MPLBACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _wait(process: subprocess.Popen[bytes], seconds: float, tell: Callable[[], None]) -> bool:
    """Waits for the end of a process; False if time was up before."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        tell()
        time.sleep(_POLL_SECONDS)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it started, also when the kernel was interrupted."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _results(task: Task, events: Iterable[dict[str, Any]], late: str | None) -> Iterable[FunctionResult]:
    found: dict[str, FunctionResult] = {}
    running = None
    for event in events:
        if event["kind"] == "start":
            running = event["name"]
            continue
        running = None
        case = _case(event)
        if event["name"] not in found or _severity(case) > _severity(found[event["name"]]):
            found[event["name"]] = case
    if late and running:
        found[running] = FunctionResult(running, Outcome.FAILED, late, late)
    missing = "the run ended before this test"
    return [found.get(name) or FunctionResult(name, Outcome.NOT_RUN, missing, missing) for name in task.tests]


def _case(event: dict[str, Any]) -> FunctionResult:
    if event["outcome"] == "passed":
        return FunctionResult(event["name"], Outcome.PASSED)
    outcome = Outcome.SKIPPED if event["outcome"] == "skipped" else Outcome.FAILED
    if event["not_attempted"]:
        outcome = Outcome.NOT_WRITTEN
    return FunctionResult(event["name"], outcome, event["message"], event["text"])


def _severity(result: FunctionResult) -> int:
    return list(Outcome).index(result.outcome)
