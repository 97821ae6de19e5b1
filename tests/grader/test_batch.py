"""A batch goes on, whatever becomes of one submission; faults of the grader's own never count as a student's 0."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import grader.batch
from grader.batch import Batch, grade_all
from grader.isolation.sandbox import Tier
from grader.journal import read_journal
from grader.suite import SuiteRun
from grader.verdicts import CaseResult, SubmissionResult, Verdict
from labkit.manifest import Manifest

Suite = Callable[[SuiteRun, Callable[[CaseResult], None]], dict[str, Any]]
GradeWith = Callable[..., list[SubmissionResult]]


class Silent:
    """Progress that only counts."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def started(self, name: str) -> None:
        """Nothing."""

    def case(self, name: str) -> None:
        """Nothing."""

    def finished(self, result: SubmissionResult) -> None:
        """Remembers the name."""
        self.done.append(result.name)

    def idle(self) -> None:
        """Nothing."""


def text_of(run: SuiteRun) -> str:
    """What was handed in as part1.py."""
    return (run.folder / "part1.py").read_text()


def passes(run: SuiteRun, report: Callable[[CaseResult], None]) -> dict[str, Any]:
    """A suite that everything passes."""
    for task in run.manifest.tasks:
        for name in task.tests:
            report(CaseResult(name, name, Verdict.PASSED))
    return {}


@pytest.fixture
def grade_with(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GradeWith:
    """Grades one submission for each word, its text, by a suite of the test's; in the order of their names."""
    monkeypatch.setattr(grader.batch, "preload", lambda: None)
    monkeypatch.setattr(grader.batch, "suite_hash", lambda manifest: "")
    (tmp_path / "out").mkdir()

    def run(suite: Suite, *texts: str, jobs: int = 2) -> list[SubmissionResult]:
        monkeypatch.setattr(grader.batch, "run_suite", suite)
        entries = {}
        for number, text in enumerate(texts):
            entries[f"s{number}"] = tmp_path / f"s{number}"
            entries[f"s{number}"].mkdir()
            (entries[f"s{number}"] / "part1.py").write_text(text)
        progress = Silent()
        results = grade_all(Batch(manifest, entries, tmp_path / "out", Tier.NONE, 0, jobs), progress)
        assert sorted(progress.done) == list(entries)
        return results

    return run


def crash(run: SuiteRun, report: Callable[[CaseResult], None]) -> dict[str, Any]:
    """Does to the process that runs the tests what the submission's text says."""
    match text_of(run):
        case "raise":
            raise RuntimeError("a fault of our own")
        case "exit":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "half":
            report(CaseResult("test_a", "test_a", Verdict.PASSED))
            os._exit(0)
    return passes(run, report)


def test_one_submission_cannot_stop_the_others(grade_with: GradeWith) -> None:
    results = grade_with(crash, "raise", "exit", "good", "kill", "half", "good")
    assert [result.name for result in results] == [f"s{n}" for n in range(6)]
    assert [result.points for result in results] == [0, 0, 20, 0, 3.33, 20]
    assert [result.needs_review for result in results] == [True, True, False, True, True, False]


def test_a_fault_of_our_own_is_tried_again_and_then_named(grade_with: GradeWith, tmp_path: Path) -> None:
    (result,) = grade_with(crash, "raise")
    assert {test.verdict for task in result.tasks for test in task.tests} == {Verdict.INTERNAL_ERROR}
    assert "a fault of our own" in result.flags[0]
    ends = [record for record in read_journal(tmp_path / "out" / "journal.jsonl") if record["kind"] == "end"]
    assert [end["attempt"] for end in ends] == [1, 2]


def test_a_second_attempt_that_works_counts_and_the_first_leaves_no_trace(
    grade_with: GradeWith, tmp_path: Path
) -> None:
    def once(run: SuiteRun, report: Callable[[CaseResult], None]) -> dict[str, Any]:
        if not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            report(CaseResult("test_a", "test_a", Verdict.WRONG_ANSWER, "of the first attempt"))
            os._exit(1)
        return passes(run, report)

    (result,) = grade_with(once, "good")
    assert result.points == 20 and not result.needs_review and result.flags == ()


def test_a_run_that_hangs_is_ended(grade_with: GradeWith, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader.batch, "_SUITE_SECONDS", 1.0)

    def hang(run: SuiteRun, report: Callable[[CaseResult], None]) -> dict[str, Any]:
        if text_of(run) == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        return passes(run, report)

    begun = time.monotonic()
    stuck, good = grade_with(hang, "hang", "good")
    assert time.monotonic() - begun < 20
    assert (stuck.points, stuck.needs_review, good.points) == (0, True, 20)


def test_results_do_not_depend_on_the_number_of_jobs(grade_with: GradeWith, tmp_path: Path) -> None:
    texts = ["good", "kill", "good"]
    one = grade_with(crash, *texts, jobs=1)
    for number in range(len(texts)):
        (tmp_path / f"s{number}" / "part1.py").unlink()
        (tmp_path / f"s{number}").rmdir()
    assert grade_with(crash, *texts, jobs=3) == one


def test_what_cannot_be_taken_in_is_a_result_too(grade_with: GradeWith, manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "bad.zip").write_text("no zip")
    (tmp_path / "void").mkdir()
    entries = {"bad": tmp_path / "bad.zip", "void": tmp_path / "void", "gone": tmp_path / "gone"}
    results = grade_all(Batch(manifest, entries, tmp_path / "out", Tier.NONE, 0, 1), Silent())
    verdicts = [result.tasks[0].tests[0].verdict for result in results]
    assert verdicts == [Verdict.REFUSED, Verdict.NOT_ATTEMPTED, Verdict.REFUSED]
    assert all(result.points == 0 and result.needs_review and result.flags for result in results)


def test_no_jobs_is_refused(grade_with: GradeWith) -> None:
    with pytest.raises(ValueError, match="--jobs"):
        grade_with(passes, "good", jobs=0)
