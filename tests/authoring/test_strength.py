"""The strength run: what counts as killed, and that real runs report what really happened."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from grader.authoring import strength
from grader.authoring.degenerate import Degenerate
from grader.authoring.misconceptions import Misconception
from grader.authoring.runs import Case, Job, SuiteRun, run_all
from grader.authoring.strength import Correct, Entry, measure_strength, select
from labkit.manifest import ROOT, Manifest

WRONG = Misconception("wrong", 1, "numbers", "(number, 2)", "(number, 3)", "It is a third.", "How many parts?")
PASSED, FAILED = Case(1, passed=2), Case(1, passed=1, failures=["6 is not 8"])
SKIPPED = Case(1, passed=1, skipped=1)


@pytest.fixture
def fault_of(halves: Manifest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the strength run says of an entry whose suite ended in a given way."""

    def judge(entry: Entry, cases: dict[str, Case], **ending: str) -> str | None:
        def pretended(manifest: Manifest, jobs: Iterable[Job], parallel: int) -> Iterator[SuiteRun]:
            for job in jobs:
                assert (job.folder / "numbers.py").is_file()
                yield SuiteRun(job, cases, 1.0, **ending)  # type: ignore[arg-type]

        monkeypatch.setattr(strength, "run_all", pretended)
        report = measure_strength(halves, [entry])
        (verdict,) = report.verdicts
        assert report.killed == (not isinstance(entry, Correct) and verdict.fault is None)
        return verdict.fault

    return judge


def test_a_mutant_is_killed_by_a_failure_or_by_the_clock(fault_of: Any) -> None:
    assert fault_of(WRONG, {"test_half": PASSED, "test_quarter": FAILED}) is None
    assert fault_of(WRONG, {"test_half": PASSED}, timed_out="test_quarter") is None
    assert fault_of(WRONG, {"test_half": PASSED, "test_quarter": PASSED}) == WRONG.explanation
    assert "skipped: test_half" in fault_of(WRONG, {"test_half": SKIPPED})
    assert fault_of(WRONG, {}, error="ImportError in conftest") == "ImportError in conftest"


def test_a_non_answer_may_pass_no_test_function(fault_of: Any, halves: Manifest) -> None:
    stub = Degenerate("stub", halves.task(1))
    assert fault_of(stub, {"test_half": FAILED, "test_quarter": FAILED}) is None
    assert "passes test_half" in fault_of(stub, {"test_half": PASSED, "test_quarter": FAILED})
    assert "did not run: test_half" in fault_of(stub, {"test_quarter": FAILED})


def test_a_right_implementation_must_pass_everything(fault_of: Any, halves: Manifest) -> None:
    right = Correct("correct/other", halves.solutions)
    assert fault_of(right, {"test_half": PASSED}) is None
    assert "test_half: 6 is not 8" in fault_of(right, {"test_half": FAILED})
    assert "took longer" in fault_of(right, {}, timed_out="test_half")


def test_entries_are_selected_by_pattern() -> None:
    assert select([WRONG], "wr*") == [WRONG]
    with pytest.raises(ValueError, match="no entry is named 'right'; names are: wrong"):
        select([WRONG], "right")


def test_nothing_runs_with_no_job_at_once(halves: Manifest) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        next(run_all(halves, [], parallel=0))


REPLACEMENTS = {
    "rounds-up": "return (number + 1) // 2",
    "means-the-same": "return number // 2",
    "never-ends": """while True:
        try:
            while True:
                pass
        except BaseException:
            pass""",
    "ends-the-process": "__import__('os')._exit(0)",
}

SCRIPT = """
import json, sys
from pathlib import Path

import labkit.pytest_plugin
from grader.authoring.misconceptions import Misconception, write_mutant
from grader.authoring.runs import Job, run_all
from labkit.manifest import load_manifest

manifest = load_manifest("98", Path(sys.argv[1]))
labkit.pytest_plugin.available_labs = lambda: {"98": manifest.folder}
labkit.pytest_plugin.load_manifest = lambda lab_id: manifest
jobs = []
for name, code in json.loads(sys.argv[2]).items():
    entry = Misconception(name, 1, "numbers", "return operator.floordiv(number, 2)", code, "", "")
    folder = write_mutant(manifest, entry, Path(sys.argv[1]) / name)
    jobs.append(Job(name, folder, (1,), stop_at_failure=True, seconds=6.0 if name == "never-ends" else 100.0))
for run in run_all(manifest, jobs):
    case = run.cases.get("test_half")
    counts = (case.passed, len(case.failures)) if case else None
    print(json.dumps([run.job.name, counts, run.timed_out, run.error]))
"""


def test_real_runs_report_what_happened(halves: Manifest) -> None:
    # In a process of its own: this one has computed with torch, and a fork of it might hang.
    root = halves.folder.parent.parent
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), json.dumps(REPLACEMENTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    said = {name: rest for name, *rest in map(json.loads, result.stdout.splitlines())}
    assert said["rounds-up"] == [[1, 1], None, None]
    assert said["means-the-same"] == [[2, 0], None, None]
    _, timed_out, error = said["never-ends"]
    assert timed_out is not None and error is None
    counts, timed_out, error = said["ends-the-process"]
    assert counts is None and timed_out is None
    assert error is not None and "process code 0" in error, "a run that breaks off has neither passed nor failed"
