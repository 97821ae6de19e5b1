"""Runs the trusted suite of a lab on one submission: tests here, the submission's code in its sandbox.

Verdicts come from pytest's hooks in this process, from the exception that ended a test. Nothing that the submission
prints, writes or exits with is ever read as a result.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grader.isolation.proxy import Limits, Outcome, SubmissionWorker, Tier, WorkerFailed, WorkerNotStarted
from grader.staging import Staging, find_faults
from grader.verdicts import CaseResult, Verdict
from labkit.banned import find_banned
from labkit.client import LabClient
from labkit.errors import ProtocolFault, exception_chain, not_attempted_text
from labkit.manifest import ROOT, Manifest, Task
from labkit.pytest_plugin import LAB_PROVIDER, task_number

TIME_OUTS_PER_TASK = 3

_VERDICTS = {
    Outcome.CPU_TIMEOUT: Verdict.TIMEOUT_CPU,
    Outcome.WALL_TIMEOUT: Verdict.TIMEOUT_WALL,
    Outcome.MEMORY: Verdict.MEMORY,
    Outcome.OUTPUT: Verdict.OUTPUT_LIMIT,
    Outcome.EXITED: Verdict.EXITED_EARLY,
    Outcome.KILLED: Verdict.EXITED_EARLY,
    Outcome.PROTOCOL_FAULT: Verdict.PROTOCOL_FAULT,
    Outcome.BUDGET: Verdict.TIMEOUT_CPU,
}
# What Python raises when a test takes a value for something it is not: None for a tensor, a list for an int.
_MISFITS = (AttributeError, LookupError, OverflowError, RuntimeError, StopIteration, TypeError, ValueError)
_PRELOADED = (
    "numpy",
    "torch",
    "grader.judge",
    "labkit.specs",
    "labkit.checkpoints",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True)
class SuiteRun:
    """What a run needs.

    Args:
        manifest: the lab.
        folder: the submission's modules.
        tier: how they are held.
        limits: what they may use.
        seed: of everything that tests draw from the global generators.
    """

    manifest: Manifest
    folder: Path
    tier: Tier
    limits: Limits
    seed: int


@dataclass(frozen=True)
class Decision:
    """A verdict on a test that was reached without running it."""

    verdict: Verdict
    message: str


def preload() -> None:
    """Imports what suites use, so that forks inherit it. Computes nothing: torch's threads do not survive a fork."""
    for name in _PRELOADED:
        importlib.import_module(name)


def test_seed(seed: int, lab_id: str, test: str) -> int:
    """The seed of one test, which no other test's seed tells anything about."""
    digest = hmac.digest(str(seed).encode(), f"{lab_id}/{test}".encode(), "sha256")
    return int.from_bytes(digest[:7], "big")


test_seed.__test__ = False  # type: ignore[attr-defined]  # no test, whatever its name


def suite_hash(manifest: Manifest) -> str:
    """Hash of the lab's manifest and tests: results are comparable where it is the same."""
    digest = hashlib.sha256()
    for path in [manifest.folder / "lab.toml", *sorted(manifest.tests_folder.rglob("*.py"))]:
        digest.update(f"{path.relative_to(manifest.folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run_suite(run: SuiteRun, report: Callable[[CaseResult], None]) -> dict[str, Any]:
    """Runs every test of the lab on a submission, in this process, which should be a fork made for it.

    Args:
        run: what to run.
        report: called with each case's result as soon as it is known.

    Returns:
        For the journal: processor time used, and what happened to the worker.

    Raises:
        RuntimeError: if pytest could not run the suite.
        WorkerNotStarted: if the sandbox did not come up.
    """
    import torch

    torch.set_num_threads(1)
    for name in ("IMPL", "TASK", "PYTEST_ADDOPTS"):  # the caller's own; they would choose other tests
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with (
        tempfile.TemporaryDirectory(prefix="staged-", dir=run.folder.parent) as staged,
        SubmissionWorker(run.manifest, Path(staged), run.tier, run.limits) as worker,
    ):
        staging = Staging(run.manifest, run.folder, Path(staged))
        plugin = _Judge(run, worker, decide_tasks(run, staging, worker), report)
        code = pytest.main(
            [
                str(run.manifest.tests_folder), "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT),
                "-p", "no:cacheprovider",
            ],
            plugins=[plugin],
        )  # fmt: skip
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"pytest could not run the suite and ended with code {int(code)}")
        return {"cpu_seconds": round(worker.cpu_seconds, 2), "events": [event.message for event in worker.events]}


def decide_tasks(run: SuiteRun, staging: Staging, worker: SubmissionWorker) -> dict[int, Decision]:
    """Tasks whose tests need not run: a module is missing, uses a banned name or cannot be imported."""
    manifest = run.manifest
    uses = {m: find_banned(run.folder, [m], manifest.banned) for m in manifest.modules}
    faults = find_faults(
        staging, lambda: {module: probe.error for module, probe in worker.probe().items() if probe.error is not None}
    )
    decided: dict[int, Decision] = {}
    for task in manifest.tasks:
        if found := [str(use) for module in task.modules for use in uses[module]]:
            decided[task.number] = Decision(Verdict.BANNED_CALL, "\n".join(found))
        elif absent := [f"{module}.py" for module in task.modules if module in staging.missing]:
            decided[task.number] = Decision(Verdict.NOT_ATTEMPTED, f"{', '.join(absent)} was not handed in")
        elif broken := [module for module in task.modules if module in faults]:
            fault = faults[broken[0]]
            verdict, message = verdict_of(fault.error)
            if fault.through is not None:
                verdict, message = Verdict.BLOCKED, f"it imports {fault.through}.py, which cannot be imported"
            decided[task.number] = Decision(verdict, f"{broken[0]}.py cannot be imported: {message}")
    return decided


def verdict_of(error: BaseException) -> tuple[Verdict, str]:
    """What the exception that ended a test says about the code under test.

    Args:
        error: raised by the test's assertions, by a lab call, by the worker's proxy, or by a fault of our own.

    Returns:
        The verdict and its reason, for the student.
    """
    failed = [link for link in exception_chain(error) if isinstance(link, WorkerFailed)]
    if failed:
        # An assertion about a call that never returned is about that.
        return _VERDICTS[failed[-1].outcome], str(failed[-1])
    if isinstance(error, ProtocolFault):
        return Verdict.PROTOCOL_FAULT, f"sent a malformed answer: {error}"
    if text := not_attempted_text(error):
        return Verdict.NOT_ATTEMPTED, text
    if getattr(error, "from_lab", False):
        trace = getattr(error, "traceback_text", "") or f"{type(error).__name__}: {error}"
        return Verdict.EXCEPTION, trace
    if isinstance(error, pytest.skip.Exception):
        return Verdict.UNVERIFIED, f"not verified on this machine: {error}"
    if isinstance(error, (AssertionError, pytest.fail.Exception)):
        return Verdict.WRONG_ANSWER, str(error)
    if isinstance(error, _MISFITS) and not isinstance(error, WorkerNotStarted) and _stays_in_tests(error):
        text = f"{type(error).__name__}: {error}"
        return Verdict.WRONG_ANSWER, f"the answer is not of the kind that was asked for: {text}"
    return Verdict.INTERNAL_ERROR, "".join(traceback.format_exception(error)[-6:])


def _stays_in_tests(error: BaseException) -> bool:
    """Whether it was raised by a test, or by a library that the test handed an answer to: not by the grader itself."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    own = (str(ROOT / "labkit" / "codec.py"), str(ROOT / "grader" / "isolation"), str(ROOT / "grader" / "suite.py"))
    return bool(files) and not any(file.startswith(own) for file in files)


class _Judge:
    """The pytest plugin of a run: hands out sandboxed labs and turns the end of each test into a verdict."""

    def __init__(
        self,
        run: SuiteRun,
        worker: SubmissionWorker,
        decided: dict[int, Decision],
        report: Callable[[CaseResult], None],
    ) -> None:
        self._run = run
        self._worker = worker
        self._decided = decided
        self._report = report
        self._time_outs: Counter[int] = Counter()
        self._phases: list[tuple[Verdict, str]] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        """Before collection."""
        config.stash[LAB_PROVIDER] = self._provide

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Only the manifest says what is a test."""
        items[:] = [item for item in items if self._task(item) is not None]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Instead of running a test whose verdict is known already."""
        task = self._task(item)
        assert task is not None
        decision = self._decided.get(task.number)
        if decision is None:
            self._phases = []
            return None
        integration = item.get_closest_marker("integration") is not None
        name = _function(item)
        self._report(CaseResult(name, name, decision.verdict, decision.message, integration))
        return True

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Before the fixtures of a test."""
        import torch

        seed = test_seed(self._run.seed, self._run.manifest.id, item.nodeid)
        random.seed(seed)
        torch.manual_seed(seed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """After each phase of a test: set-up, call, teardown."""
        result: Any = yield
        if call.excinfo is not None:
            self._phases.append(verdict_of(call.excinfo.value))
        elif call.when == "call":
            self._phases.append((Verdict.PASSED, ""))
        if call.when == "teardown":
            self._finish(item)
        return result

    def _finish(self, item: pytest.Item) -> None:
        task = self._task(item)
        assert task is not None
        verdict, message = max(self._phases, key=lambda phase: phase[0].severity)
        integration = item.get_closest_marker("integration") is not None
        self._report(CaseResult(_function(item), item.name, verdict, message, integration))
        self._time_outs[task.number] += verdict.is_timeout
        if self._worker.cpu_seconds >= self._run.limits.total_cpu_seconds:
            seconds = f"{self._run.limits.total_cpu_seconds:.0f}"
            text = f"not run: the submission has used up its {seconds} seconds of processor time"
            for each in self._run.manifest.tasks:
                self._decided.setdefault(each.number, Decision(Verdict.TIMEOUT_CPU, text))
        elif self._time_outs[task.number] >= TIME_OUTS_PER_TASK:
            self._decided[task.number] = Decision(verdict, "not run: its task was ended after three time-outs")

    def _provide(self, item: pytest.Item, manifest: Manifest) -> AbstractContextManager[LabClient]:
        return self._worker.test()

    def _task(self, item: pytest.Item) -> Task | None:
        task = self._run.manifest.task_of_test(_function(item))
        return task if task is not None and task.number == task_number(item) else None


def _function(item: pytest.Item) -> str:
    return getattr(item, "originalname", None) or item.name.partition("[")[0]
