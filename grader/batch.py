"""Grades a folder of submissions, a few at a time, each in a process of its own; none can stop the others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

from grader.intake import Submission, take_in
from grader.isolation.sandbox import Limits, Tier
from grader.journal import Journal
from grader.suite import SuiteRun, preload, run_suite, suite_hash
from grader.verdicts import CaseResult, SubmissionResult, Verdict, clean_text, same_for_all, task_results
from labkit.banned import find_banned
from labkit.manifest import Manifest

JOURNAL_NAME = "journal.jsonl"

_ATTEMPTS = 2
_SUITE_SECONDS = 3600.0
"""Clock time for one submission; far above what its limits allow, so that passing it is the grader's trouble."""
_POLL_SECONDS = 0.5


class Progress(Protocol):
    """What a batch tells while it runs."""

    def started(self, name: str) -> None:
        """A submission's tests begin."""

    def case(self, name: str) -> None:
        """One more test case of a submission is done."""

    def finished(self, result: SubmissionResult) -> None:
        """A submission is graded."""

    def idle(self) -> None:
        """Some time has passed."""


@dataclass(frozen=True)
class Batch:
    """What to grade and how.

    Args:
        manifest: the lab.
        entries: folders and archives by the names that reports use.
        out: an existing folder; the journal goes there.
        tier: how submissions are held.
        seed: of what tests draw at random.
        jobs: submissions at a time, at least 1.
        limits: what a submission may use.
    """

    manifest: Manifest
    entries: dict[str, Path]
    out: Path
    tier: Tier
    seed: int
    jobs: int
    limits: Limits = field(default_factory=Limits)


def default_jobs() -> int:
    """One submission for each physical core: CPU time is what decides about time-outs."""
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def grade_all(batch: Batch, progress: Progress) -> list[SubmissionResult]:
    """Grades every entry.

    Args:
        batch: what to grade.
        progress: told as the batch goes on.

    Returns:
        One result for each entry, in the order of the entries.

    Raises:
        ValueError: if `jobs` is less than 1.
    """
    if batch.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {batch.jobs}")
    preload()
    results: dict[str, SubmissionResult] = {}
    with (
        Journal(batch.out / JOURNAL_NAME) as journal,
        tempfile.TemporaryDirectory(prefix="grading-") as scratch,
        selectors.DefaultSelector() as selector,
    ):
        journal.write(
            "batch",
            lab=batch.manifest.id,
            suite_sha256=suite_hash(batch.manifest),
            seed=batch.seed,
            tier=batch.tier.value,
            limits=dataclasses.asdict(batch.limits),
        )

        def conclude(result: SubmissionResult) -> None:
            results[result.name] = result
            journal.write("submission", name=result.name, sha256=result.sha256, points=result.points)
            progress.finished(result)

        waiting = list(batch.entries.items())
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and len(running) < batch.jobs:
                    name, entry = waiting.pop(0)
                    begun = _begin(batch, name, entry, Path(scratch), journal)
                    if isinstance(begun, SubmissionResult):
                        conclude(begun)
                    else:
                        progress.started(name)
                        selector.register(begun.connection, selectors.EVENT_READ, begun)
                        running.append(begun)
                for key, _ in selector.select(_POLL_SECONDS):
                    key.data.read(progress.case)
                for run in [run for run in running if run.over()]:
                    running.remove(run)
                    selector.unregister(run.connection)
                    if run.wants_another_attempt:
                        again = run.again()
                        selector.register(again.connection, selectors.EVENT_READ, again)
                        running.append(again)
                    else:
                        conclude(run.result())
                progress.idle()
        finally:
            for run in running:
                run.end()
    return [results[name] for name in batch.entries]


def _begin(
    batch: Batch, name: str, entry: Path, scratch: Path, journal: Journal
) -> _Running | SubmissionResult:
    """Takes a submission in and starts its tests; a result at once if there is nothing to test."""
    manifest = batch.manifest
    try:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        submission = take_in(name, entry, manifest, folder)
        if submission.folder is None:
            reason = submission.refusal or "refused"
            tasks = same_for_all(manifest, Verdict.REFUSED, reason)
            return SubmissionResult(name, "", tasks, flags=(f"refused: {reason}",))
        if not any(folder.iterdir()):
            names = ", ".join(f"{module}.py" for module in manifest.modules)
            tasks = same_for_all(manifest, Verdict.NOT_ATTEMPTED, "no file of the lab was handed in")
            flag = f"nothing to grade: none of {names} was found"
            return SubmissionResult(name, "", tasks, submission.ignored, (flag,))
        return _Running(batch, submission, journal)
    except Exception as error:
        text = clean_text("".join(traceback.format_exception(error)))
        tasks = same_for_all(manifest, Verdict.INTERNAL_ERROR, f"the grader failed on this submission: {text}")
        flag = clean_text(f"the grader failed: {type(error).__name__}: {error}")
        return SubmissionResult(name, "", tasks, flags=(flag,))


class _Running:
    """A submission whose tests run in a fork of this process."""

    def __init__(self, batch: Batch, submission: Submission, journal: Journal, attempt: int = 1) -> None:
        assert submission.folder is not None
        self._batch = batch
        self._submission = submission
        self._journal = journal
        self._attempt = attempt
        self._cases: list[CaseResult] = []
        self._failure: str | None = "the process that runs the tests ended early"
        self._started = time.monotonic()
        self._open = True
        self.connection, theirs = multiprocessing.Pipe(duplex=False)
        run = SuiteRun(batch.manifest, submission.folder, batch.tier, batch.limits, batch.seed)
        self._process = multiprocessing.get_context("fork").Process(target=_child, args=(run, theirs))
        self._process.start()
        theirs.close()

    @property
    def wants_another_attempt(self) -> bool:
        """Whether a fault of the grader's own ended it, and it was not tried again yet."""
        return self._failure is not None and self._attempt < _ATTEMPTS

    def read(self, on_case: Callable[[str], None]) -> None:
        """Takes in one message of the child."""
        name = self._submission.name
        try:
            record = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):  # the latter if it was killed in the middle of a message
            self._open = False
            return
        if record["kind"] == "case":
            del record["kind"]
            case = CaseResult(**{**record, "verdict": Verdict(record["verdict"])})
            self._cases.append(case)
            fields = {**dataclasses.asdict(case), "verdict": case.verdict.value, "message": clean_text(case.message)}
            self._journal.write("case", name=name, sha256=self._submission.sha256, **fields)
            on_case(name)
        else:
            self._failure = record["failure"]
            self._journal.write("end", name=name, attempt=self._attempt, **record["facts"], failure=self._failure)

    def over(self) -> bool:
        """Whether the child is gone and everything it said is read; ends it if it runs for much too long."""
        if self._open and time.monotonic() - self._started > _SUITE_SECONDS:
            self._failure = f"the tests did not end within {_SUITE_SECONDS:.0f} seconds"
            self.end()
            self._open = False
        return not self._open

    def end(self) -> None:
        """Kills the child and what it started; its sandbox dies with it."""
        pid = self._process.pid
        if pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                # Its own process group once it has got that far; never this process's group.
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
        self._process.join()

    def again(self) -> _Running:
        """The same submission from the start."""
        self.end()
        self.connection.close()
        return _Running(self._batch, self._submission, self._journal, self._attempt + 1)

    def result(self) -> SubmissionResult:
        """What its tests came to."""
        self.end()
        self.connection.close()
        flags = []
        if self._failure is not None:
            flags.append(f"the grader failed, twice: {clean_text(self._failure)}")
        tasks = task_results(self._batch.manifest, self._cases)
        manifest, folder = self._batch.manifest, self._submission.folder
        if folder is not None:
            flags += [str(use) for use in find_banned(folder, manifest.modules, manifest.banned)]
        for verdict, what in (
            (Verdict.UNVERIFIED, "could not be verified on this machine"),
            (Verdict.PROTOCOL_FAULT, "ended with a malformed message from the submission"),
            (Verdict.INTERNAL_ERROR, "ended with a fault of the grader's own"),
        ):
            names = [test.name for task in tasks for test in task.tests if test.verdict is verdict]
            if names:
                flags.append(f"{len(names)} test(s) {what}: {', '.join(names[:3])}{', …' if names[3:] else ''}")
        return SubmissionResult(
            self._submission.name, self._submission.sha256, tasks, self._submission.ignored, tuple(flags)
        )


def _child(run: SuiteRun, connection: Connection) -> None:
    """The forked process; never returns to the code that forked."""
    os.setpgid(0, 0)
    said = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
    failure: str | None = None
    facts: dict[str, Any] = {}
    try:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115

        def report(case: CaseResult) -> None:
            record = {**dataclasses.asdict(case), "verdict": case.verdict.value, "kind": "case"}
            # Escaped to ASCII: a message may hold lone surrogates.
            connection.send_bytes(json.dumps(record).encode())

        facts = run_suite(run, report)
    except BaseException as error:
        sys.stdout.flush()
        said.seek(0)
        tail = said.read()[-1500:].decode(errors="replace")
        failure = "".join(traceback.format_exception(error))[-1500:] + (f"\n{tail}" if tail else "")
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps({"kind": "end", "facts": facts, "failure": failure}).encode())
        connection.close()
    os._exit(0)  # what the parent had open is the parent's to clean up
