"""Stubs: what they keep, what they say, and whose files they overwrite."""

from __future__ import annotations

import ast
import re

import pytest

from grader.authoring.regions import MarkerError
from grader.authoring.stubs import (
    Outcome,
    generate_stub,
    is_untouched,
    stale_stubs,
    strip_regions,
    task_of_module,
    write_stubs,
)
from labkit.manifest import load_manifest

from .conftest import SmallLab


def run(source: str) -> dict[str, object]:
    """The names that a module defines."""
    names: dict[str, object] = {}
    exec(compile(source, "stub.py", "exec"), names)
    return names


def test_a_stub_keeps_signatures_and_checks_and_names_the_task(small_lab: SmallLab) -> None:
    names = run(generate_stub(small_lab.manifest, "counting"))
    count, box = names["count"], names["Box"]
    assert count.__doc__ == "How many numbers there are."  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="sizes are missing"):
        count([])  # type: ignore[operator]
    with pytest.raises(NotImplementedError, match=r"^lab 99 task 1: count is not written yet\. Count the numbers"):
        count([1])  # type: ignore[operator]
    with pytest.raises(NotImplementedError, match=r"lab 99 task 1: Box\.volume"):
        box().volume(2)  # type: ignore[operator]


def test_solution_only_imports_and_helpers_are_gone(small_lab: SmallLab) -> None:
    stub = generate_stub(small_lab.manifest, "counting")
    for gone in ("SOLUTION", "prod", "_helper", "edge * edge"):
        assert gone not in stub, f"{gone!r} still stands in the stub"
    assert "\n\n\n\n" not in stub, "a deleted region leaves its blank lines behind"


def test_a_kernel_gets_a_static_assertion() -> None:
    source = "@triton.jit\ndef add(x):\n    # BEGIN SOLUTION\n    y = x\n    # END SOLUTION\n"
    task = load_manifest("07").task(1)
    stub = strip_regions(source, "add.py", "06", task)
    assert re.search(r'    tl\.static_assert\(\n        False,\n        "lab 06 task 1', stub)
    assert "raise" not in stub


def test_a_goal_with_quotes_and_backslashes_still_gives_python(small_lab: SmallLab) -> None:
    task = load_manifest("07").task(1)
    odd = type(task)(**{**vars(task), "goal": 'Say "no" to \\n and ' + "long words " * 20})
    stub = strip_regions(small_lab.reference.read_text(), "counting.py", "99", odd)
    with pytest.raises(NotImplementedError, match=re.escape('Say "no" to \\n and long words long')):
        run(stub)["count"]([1])  # type: ignore[operator]


def test_a_region_around_everything_a_block_has_is_refused() -> None:
    task = load_manifest("07").task(1)
    with pytest.raises(MarkerError, match="no Python any more"):
        strip_regions("class A:\n    # BEGIN SOLUTION\n    x = 1\n    # END SOLUTION\n", "a.py", "07", task)
    with pytest.raises(MarkerError, match="no marked region"):
        strip_regions("x = 1\n", "a.py", "07", task)


def test_only_absent_and_untouched_files_are_written(small_lab: SmallLab) -> None:
    def outcome(force: bool = False) -> Outcome:
        (report,) = write_stubs(small_lab.manifest, force=force)
        assert report.path == small_lab.stub
        return report.outcome

    assert outcome() is Outcome.WRITTEN
    assert outcome() is Outcome.UNCHANGED
    assert is_untouched(small_lab.stub.read_text())

    # A newer reference replaces a stub that nobody has edited ...
    small_lab.reference.write_text(small_lab.reference.read_text().replace("How many", "Just how many"))
    assert stale_stubs(small_lab.manifest) == [small_lab.stub]
    assert outcome() is Outcome.WRITTEN
    assert stale_stubs(small_lab.manifest) == []

    # ... and never one that somebody has.
    edited = small_lab.stub.read_text().replace("raise NotImplementedError(", "return 6\n    (", 1)
    small_lab.stub.write_text(edited)
    small_lab.reference.write_text(small_lab.reference.read_text().replace("Just how", "Exactly how"))
    assert outcome() is Outcome.KEPT
    assert small_lab.stub.read_text() == edited
    assert stale_stubs(small_lab.manifest) == [], "a student's own file is not out of date"
    assert outcome(force=True) is Outcome.WRITTEN
    assert "Exactly how many" in small_lab.stub.read_text()
    assert list(small_lab.stub.parent.glob(".*")) == [], "a temporary file is left behind"


def test_a_missing_reference_and_an_ambiguous_task_are_refused(small_lab: SmallLab) -> None:
    small_lab.reference.unlink()
    with pytest.raises(ValueError, match=r"counting\.py is missing"):
        write_stubs(small_lab.manifest)
    assert not small_lab.stub.exists()
    with pytest.raises(ValueError, match="belongs to 0"):
        task_of_module(small_lab.manifest, "unknown")


@pytest.mark.parametrize("module", load_manifest("07").modules)
def test_stubs_of_lab_07_are_python_and_say_how_to_go_on(module: str) -> None:
    stub = generate_stub(load_manifest("07"), module)
    ast.parse(stub)
    number = task_of_module(load_manifest("07"), module).number
    assert f"make test-lab07 TASK={number}" in stub.splitlines()[1]
    assert max(map(len, stub.splitlines())) <= 120
