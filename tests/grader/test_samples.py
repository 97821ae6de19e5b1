"""Every sample submission gets exactly the score and the verdicts that it has earned, and the same ones again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from grader.isolation.sandbox import bwrap_fault
from grader.sample_submissions import Edit, Sample, load_samples, sample_files, write_samples
from grader.verdicts import NEEDS_REVIEW, Verdict
from labkit.manifest import load_manifest

MANIFEST = load_manifest("07")
SAMPLES = load_samples(MANIFEST)
ROOT = Path(__file__).resolve().parents[2]
AGAIN = ("half_done", "zip_bomb")
# Half a minute each, and of the same kind as others: graded by `make evidence`.
LONG = frozenset(
    "mask_from_the_top crossing_token_dropped counts_query_heads built_differently library_call does_not_parse "
    "exits_on_import exits_in_a_call patches_the_judge blank endless_loop memory_hog output_flood fork_bomb".split()
)
# One of each kind stands for them in the quick form.
TASTE = frozenset({"mask_from_the_top", "exits_on_import", "endless_loop"})
QUICK = os.environ.get("EVIDENCE") == "quick"


def marks(name: str) -> list[pytest.MarkDecorator]:
    """When a sample is graded."""
    if name not in LONG:
        return []
    return [pytest.mark.evidence, pytest.mark.skipif(QUICK and name not in TASTE, reason="left to the full form")]


CASES = [pytest.param(each, id=each.name, marks=marks(each.name)) for each in SAMPLES]


def grade(submissions: Path, out: Path, *options: str) -> int:
    """Grades in a process of its own, as a user does; its forks must not inherit the threads of this one's torch."""
    command = [sys.executable, "-m", "grader", "grade", "--lab", "07", "--cpu-seconds", "8"]
    command += ["--submissions", str(submissions), "--out", str(out), *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert run.returncode in (0, 3), f"exit code {run.returncode}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return run.returncode


def read(out: Path) -> dict[str, dict[str, Any]]:
    """Submissions of a JSON report by name."""
    return {each["name"]: each for each in json.loads((out / "results.json").read_text())["submissions"]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run; tests that are spread over processes have it in common, and one grading run serves all."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="module")
def written(shared: Path) -> Path:
    """All samples."""
    folder = shared / "samples"
    with FileLock(shared / "samples.lock"):
        if not folder.exists():
            write_samples(MANIFEST, SAMPLES, folder)
    return folder


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """The samples that the tests chosen for this run ask about."""
    chosen = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    asked = {params["sample"].name for params in chosen if isinstance(params.get("sample"), Sample)}
    asked -= LONG - TASTE if QUICK else set()
    return [sample.name for sample in SAMPLES if sample.name in asked | {"complete", "reads_the_answers", *AGAIN}]


@pytest.fixture(scope="module")
def graded(written: Path, names: list[str], shared: Path) -> Path:
    """The reports of one run over the samples in question."""
    if fault := bwrap_fault():
        pytest.skip(f"not verified here: {fault}")
    out = shared / "grades"
    only = [option for name in names for option in ("--only", name)]
    with FileLock(shared / "grades.lock"):
        if not out.exists():
            assert grade(written, out, *only) == 3, "refused samples need a person, which is exit code 3"
    return out


def test_points_follow_from_verdicts() -> None:
    points = {sample.name: [sample.points_of(task) for task in MANIFEST.tasks] for sample in SAMPLES}
    assert points["complete"] == [task.points for task in MANIFEST.tasks]
    assert points["blank"] == [0] * len(MANIFEST.tasks)
    assert points["half_done"][:4] == [20, 25, 0, 0]
    assert points["exits_in_a_call"][0] == round(20 * 12 / 14, 2)


def test_samples_cover_both_kinds_and_many_verdicts() -> None:
    verdicts = {sample.verdict_of(test) for sample in SAMPLES for task in MANIFEST.tasks for test in task.tests}
    # The grader's own faults, a machine that lacks the model, and a minute and a half of sleep.
    unreachable = {Verdict.INTERNAL_ERROR, Verdict.UNVERIFIED, Verdict.TIMEOUT_WALL}
    assert verdicts == set(Verdict) - unreachable
    assert {sample.kind for sample in SAMPLES} == {"ordinary", "hostile"}


def test_an_edit_that_no_longer_fits_is_named() -> None:
    stale = replace(SAMPLES[0], edits=(Edit("sizing", "text that stands nowhere", "x"),))
    with pytest.raises(ValueError, match=r"complete.*sizing 0 times"):
        sample_files(MANIFEST, stale)


def test_writing_again_never_writes_through_a_link(tmp_path: Path) -> None:
    linked = [sample for sample in SAMPLES if sample.special == "symlink"]
    (tmp_path / "precious").write_text("mine")
    for _ in range(2):
        (folder,) = write_samples(MANIFEST, linked, tmp_path / "out")
        link = folder / "sizing.py"
        assert link.is_symlink()
        link.unlink()
        link.symlink_to(tmp_path / "precious")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("sample", CASES)
def test_a_sample_gets_what_it_has_earned(sample: Sample, graded: Path) -> None:
    got = read(graded)[sample.name]
    for task in got["tasks"]:
        for test in task["tests"]:
            wanted = sample.verdict_of(test["name"]).value
            assert test["verdict"] == wanted, f"{test['name']}: {test['verdict']}, not {wanted}: {test['message']}"
    points = [sample.points_of(task) for task in MANIFEST.tasks]
    assert [task["points"] for task in got["tasks"]] == points
    assert got["points"] == round(sum(points), 2)
    odd = any(sample.verdict_of(test) in NEEDS_REVIEW for task in MANIFEST.tasks for test in task.tests)
    assert got["needs_review"] == odd


def test_nothing_secret_is_found(graded: Path) -> None:
    tests = read(graded)["reads_the_answers"]["tasks"][0]["tests"]
    messages = [test["message"] for test in tests if test["verdict"] == "exception"]
    assert messages and all("found 0 things" in message for message in messages), messages


def test_the_originals_stay_as_they_are(written: Path, graded: Path, tmp_path: Path) -> None:
    write_samples(MANIFEST, SAMPLES, tmp_path)
    for path in sorted(tmp_path.rglob("*")):
        other = written / path.relative_to(tmp_path)
        if path.is_symlink():
            assert other.readlink() == path.readlink()
        elif path.is_file():
            assert other.read_bytes() == path.read_bytes()


@pytest.mark.evidence
def test_a_second_run_gives_equal_bytes(written: Path, graded: Path, tmp_path: Path) -> None:
    again = [option for name in AGAIN for option in ("--only", name)]
    grade(written, tmp_path, *again, "--jobs", "1")
    first, second = read(graded), read(tmp_path)
    assert set(second) == set(AGAIN)
    for name in AGAIN:
        assert json.dumps(second[name]) == json.dumps(first[name])
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert set(rows) <= set((graded / "results.csv").read_text().splitlines())


def test_every_case_stands_in_the_journal(graded: Path, names: list[str]) -> None:
    records = [json.loads(line) for line in (graded / "journal.jsonl").read_text().splitlines()]
    assert {r["name"] for r in records if r["kind"] == "submission"} == set(names)
    complete = {r["test"] for r in records if r["kind"] == "case" and r["name"] == "complete"}
    assert complete == {test for task in MANIFEST.tasks for test in task.tests}
