"""Runs a lab's suite on many implementations, each in a fork of this process.

Importing torch, pytest and transformers takes longer than most suites. A fork inherits them, so an implementation costs
about a second. The process that forks has imported, but never computed with torch: its threads would not survive.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit.launch import use_interpreter
from labkit.manifest import ROOT, Manifest
from labkit.result_lines import ResultLines, read_events, write_event

NEVER_RAN = "(no test ran)"

WALL_FACTOR = 10

_POLL_SECONDS = 0.02
_HEAVY = ("numpy", "torch", "grader.judge", "labkit.specs", "labkit.checkpoints")
_OF_THE_ORACLE = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")


@dataclass(frozen=True)
class Job:
    """A suite to run on an implementation.

    Args:
        name: what to call it.
        folder: holds the implementation's modules.
        tasks: numbers of the tasks whose tests run; none of them runs all.
        stop_at_failure: whether the first failure ends the run.
        seconds: processor time after which the run is ended. A busy machine must not decide, so that wall time counts
            only as a safety net, at ten times as much.
    """

    name: str
    folder: Path
    tasks: tuple[int, ...] = ()
    stop_at_failure: bool = False
    seconds: float = 120.0


@dataclass
class Case:
    """One test function: how its cases ended."""

    task: int | None
    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    not_attempted: list[str] = field(default_factory=list)
    """Those of the failures that came from an untouched stub."""


@dataclass
class SuiteRun:
    """What came of a job.

    `timed_out` names the test that was running when time was up; `error` is what pytest said when it could not run.
    """

    job: Job
    cases: dict[str, Case]
    seconds: float
    timed_out: str | None = None
    error: str | None = None

    @property
    def passed(self) -> list[str]:
        """Test functions all of whose cases passed."""
        return [name for name, case in self.cases.items() if case.passed and not case.failures and not case.skipped]

    @property
    def failed(self) -> dict[str, str]:
        """Test functions with a failed case, and the first failure's text."""
        return {name: case.failures[0] for name, case in self.cases.items() if case.failures}


def run_all(manifest: Manifest, jobs: Iterable[Job], *, parallel: int = 2) -> Iterator[SuiteRun]:
    """Runs jobs, a few at a time, and yields each when it has ended.

    Args:
        manifest: the lab whose suite runs.
        jobs: what to run it on.
        parallel: how many run at once.

    Raises:
        ValueError: `parallel` is less than 1.
    """
    if parallel < 1:
        raise ValueError(f"parallel must be at least 1, got {parallel}")
    _preload(manifest)
    waiting = iter(jobs)
    running: list[_Running] = []
    try:
        with tempfile.TemporaryDirectory(prefix="suite-runs-") as scratch:
            exhausted = False
            while running or not exhausted:
                while not exhausted and len(running) < parallel:
                    if (job := next(waiting, None)) is None:
                        exhausted = True
                    else:
                        running.append(_Running(manifest, job, Path(scratch)))
                for run in [run for run in running if run.over()]:
                    running.remove(run)
                    yield run.result()
                time.sleep(_POLL_SECONDS)
    finally:
        for run in running:
            run.end()


class _Running:
    """A job under way in a child process."""

    def __init__(self, manifest: Manifest, job: Job, scratch: Path) -> None:
        self._job = job
        self._events = Path(tempfile.mkstemp(dir=scratch, suffix=".jsonl")[1])
        self._log = self._events.with_suffix(".log")
        self._started = time.monotonic()
        self._timed_out = False
        context = multiprocessing.get_context("fork")
        self._process: BaseProcess = context.Process(target=_child, args=(manifest, job, self._events, self._log))
        self._process.start()

    def over(self) -> bool:
        """Whether it has ended; ends it if its time is up."""
        if self._process.exitcode is None and self._time_is_up():
            self._timed_out = True
            self.end()
        return self._process.exitcode is not None

    def _time_is_up(self) -> bool:
        if time.monotonic() - self._started > WALL_FACTOR * self._job.seconds:
            return True
        try:
            used = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return False
        return used.user + used.system > self._job.seconds

    def end(self) -> None:
        """Kills the child and everything it started."""
        pid = self._process.pid
        if pid is not None and self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                # Its own process group once it has got that far; never this process's group.
                group = os.getpgid(pid)
                if group == pid:
                    os.killpg(group, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
            self._process.join()

    def result(self) -> SuiteRun:
        """What the child wrote down."""
        self._process.join()
        cases: dict[str, Case] = {}
        current, code = NEVER_RAN, None
        for event in read_events(self._events):
            if event["kind"] == "start":
                current = event["name"]
            elif event["kind"] == "end":
                code = event["code"]
            else:
                case = cases.setdefault(event["name"], Case(event["task"]))
                _count(case, event)
        run = SuiteRun(self._job, cases, time.monotonic() - self._started)
        if self._timed_out:
            run.timed_out = current
        elif code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            tail = self._log.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
            run.error = f"the run ended with pytest's code {code}, process code {self._process.exitcode}:\n{tail}"
        return run


def _count(case: Case, event: dict[str, Any]) -> None:
    if event["outcome"] == "passed":
        case.passed += 1
    elif event["outcome"] == "skipped":
        case.skipped += 1
    else:
        case.failures.append(event["text"])
        if event["not_attempted"]:
            case.not_attempted.append(event["text"])


def _preload(manifest: Manifest) -> None:
    """Imports what the suite will want, but computes nothing."""
    if manifest.interpreter:
        use_interpreter()
        importlib.import_module("labkit.instruments.observation")
    texts = [path.read_text(encoding="utf-8") for path in manifest.tests_folder.glob("*.py")]
    wants_oracle = any("grader.judge.oracle" in text or "import transformers" in text for text in texts)
    for name in (*_HEAVY, *(_OF_THE_ORACLE if wants_oracle else ())):
        importlib.import_module(name)
    # Keeps what was imported out of the children's garbage collections: pytest asks for several, and each would go
    # through a million objects and copy their pages.
    gc.collect()
    gc.freeze()


def _test_files(manifest: Manifest, job: Job) -> list[Path]:
    """The files with tests of a job's tasks, each once."""
    files = [path for task in job.tasks for path in manifest.test_files(task)] or manifest.test_files()
    return list(dict.fromkeys(files))


def _child(manifest: Manifest, job: Job, events: Path, log: Path) -> None:
    """Runs pytest in the forked process; never returns to the code that forked."""
    os.setpgid(0, 0)
    import torch

    torch.set_num_threads(1)
    with log.open("w", encoding="utf-8") as output, events.open("w", encoding="utf-8") as lines:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        arguments = [
            *map(str, _test_files(manifest, job)), "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT),
            "-p", "no:cacheprovider", "--impl", str(job.folder), "--trust", "--tb=short",
        ]  # fmt: skip
        arguments += ["--task", str(job.tasks[0])] if len(job.tasks) == 1 else []
        arguments += ["-x"] if job.stop_at_failure else []
        for name in ("IMPL", "TASK"):
            os.environ.pop(name, None)
        # Plugins that happen to be installed take longer to load than most suites to run.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        try:
            code = int(pytest.main(arguments, plugins=[ResultLines(lines)]))
            write_event(lines, kind="end", code=code)
        finally:
            output.flush()
            # What the parent had open is the parent's to clean up.
            os._exit(0)
