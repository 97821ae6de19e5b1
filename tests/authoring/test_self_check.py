"""The self-check: each fault that a lab may have is named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from grader.authoring.runs import Case, Job, SuiteRun
from grader.authoring.self_check import (
    differences,
    leaks,
    manifest_faults,
    reference_faults,
    stub_faults,
    untouched_faults,
)
from labkit.manifest import Interface, LabClass, Manifest

from .conftest import SmallLab


def changed(manifest: Manifest, **fields: object) -> Manifest:
    """The manifest with fields of its one task changed."""
    (task,) = manifest.tasks
    return replace(manifest, tasks=(replace(task, **fields),))  # type: ignore[arg-type]


def one(faults: Iterable[str]) -> str:
    """The only fault."""
    found = list(faults)
    assert len(found) == 1, found
    return found[0]


def test_a_sound_lab_has_no_faults(small_lab: SmallLab) -> None:
    assert list(manifest_faults(small_lab.manifest)) == []
    assert list(stub_faults(small_lab.manifest)) == []


def test_tests_and_manifest_must_agree(small_lab: SmallLab) -> None:
    lab = small_lab.manifest
    tests = lab.tasks[0].tests
    assert "lists the test test_gone" in one(manifest_faults(changed(lab, tests=(*tests, "test_gone"))))
    assert "defines test_volume" in one(manifest_faults(changed(lab, tests=tests[:1])))


@pytest.mark.parametrize("hints", [("one", "two"), ("one", " ", "three"), ()])
def test_hints_have_three_levels_and_none_is_empty(small_lab: SmallLab, hints: tuple[str, ...]) -> None:
    assert "hints in 3 levels" in one(manifest_faults(changed(small_lab.manifest, hints=hints)))


def test_a_task_needs_points_and_tests(small_lab: SmallLab) -> None:
    assert "no points" in one(manifest_faults(changed(small_lab.manifest, points=0)))
    assert any("no tests" in fault for fault in manifest_faults(changed(small_lab.manifest, tests=())))


def test_the_interface_must_exist_in_the_reference(small_lab: SmallLab) -> None:
    def faults(functions: dict[str, str], **classes: LabClass) -> str:
        return one(manifest_faults(replace(small_lab.manifest, interface=Interface(functions, classes))))

    assert "function missing" in faults({"missing": "counting"})
    assert "class Crate" in faults({}, Crate=LabClass("counting"))
    assert "Box.weight" in faults({}, Box=LabClass("counting", ("weight",)))


def test_changed_signatures_and_docstrings_are_noticed() -> None:
    solution = 'class A:\n    def f(self, x: int) -> int:\n        """Doc."""\n        return 1\n'
    assert list(differences(solution, solution.replace("return 1", "raise NotImplementedError"))) == []
    decorated = ("    def f", "    @cache\n    def f")
    for old, new in (("x: int", "x: str"), ("-> int", "-> str"), ("Doc", "Text"), decorated):
        assert "A.f" in one(differences(solution, solution.replace(old, new)))
    assert "lacks A.f" in one(differences(solution, solution.replace("def f", "def g")))


def test_a_telling_line_outside_the_region_leaks() -> None:
    line = "total = sum(number * number for number in numbers)"
    solution = f"def f(numbers):\n    # BEGIN SOLUTION\n    {line}\n    return total\n    # END SOLUTION\n"
    assert line in one(leaks(solution, f"def f(numbers):\n    raise NotImplementedError\n\n# {line}\n{line}\n"))
    assert list(leaks(solution, "def f(numbers):\n    raise NotImplementedError\n    return total\n")) == []


def suite(**cases: Case) -> SuiteRun:
    """A run that found these test functions."""
    return SuiteRun(Job("the stubs", Path()), cases, 1.0)


def test_what_untouched_stubs_may_not_do(small_lab: SmallLab) -> None:
    text = "lab 99 task 1: count is not written yet"
    sound = Case(1, failures=[text], not_attempted=[text])
    assert list(untouched_faults(small_lab.manifest, suite(test_count=sound))) == []
    assert "passes test_count" in one(untouched_faults(small_lab.manifest, suite(test_count=Case(1, passed=1))))
    unclear = Case(1, failures=["TypeError: NoneType"])
    assert "without naming the task" in one(untouched_faults(small_lab.manifest, suite(test_count=unclear)))


def test_what_the_reference_may_not_do(small_lab: SmallLab) -> None:
    assert list(reference_faults(small_lab.manifest, suite(test_count=Case(1, passed=3)))) == []
    failing = suite(test_count=Case(1, failures=["6 is not 7"]))
    assert "fails test_count: 6 is not 7" in one(reference_faults(small_lab.manifest, failing))
    elsewhere = suite(test_count=Case(2, passed=1))
    assert "marked task 2" in one(reference_faults(small_lab.manifest, elsewhere))


def test_runs_that_broke_off_are_faults(small_lab: SmallLab) -> None:
    broken = replace(suite(), error="SyntaxError")
    assert "SyntaxError" in one(reference_faults(small_lab.manifest, broken))
    slow = replace(suite(), timed_out="test_count")
    assert "test_count was still running" in one(untouched_faults(small_lab.manifest, slow))
