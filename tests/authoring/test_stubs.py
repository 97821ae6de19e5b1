"""Stubs: what they say, and that nobody's work is overwritten."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from grader.authoring.regions import MarkerError
from grader.authoring.stubs import (
    WIDTH,
    Outcome,
    generate_stub,
    is_untouched,
    outdated_edits,
    stale_stubs,
    strip_regions,
    write_stubs,
)
from labkit.errors import NOT_ATTEMPTED_MARKER
from labkit.manifest import Manifest, available_labs, load_manifest


def test_code_is_replaced_and_everything_else_stays(halves: Manifest) -> None:
    stub = generate_stub(halves, "numbers")
    assert "operator" not in stub and "_unused_helper" not in stub
    assert '"""Half of a number, rounded down."""' in stub and "must be at least 0" in stub
    namespace: dict[str, object] = {}
    exec(stub, namespace)
    half = namespace["half"]
    assert callable(half)
    with pytest.raises(
        NotImplementedError, match=f"lab 98 task 1: half is {NOT_ATTEMPTED_MARKER}. Halve what"
    ):
        half(3)
    with pytest.raises(ValueError, match="at least 0"):
        half(-3)


def test_methods_are_named_with_their_class(halves: Manifest) -> None:
    stub = generate_stub(halves, "boxes")
    assert "lab 98 task 2: Box.size is" in stub and "lab 98 task 2: Box.put is" in stub


def test_kernels_fail_by_a_static_assertion(halves: Manifest) -> None:
    source = "@triton.jit\ndef kernel(x):\n    # BEGIN SOLUTION\n    y = x\n    # END SOLUTION\n"
    stub = strip_regions(source, "kernel.py", "98", halves.task(1))
    statement = ast.parse(stub).body[0].body[0]  # type: ignore[attr-defined]
    assert ast.unparse(statement).startswith(
        "tl.static_assert(False, 'lab 98 task 1: kernel is not written yet."
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n", "no marked region"),
        ("class Box:\n    # BEGIN SOLUTION\n    x = 1\n    # END SOLUTION\n", "no Python any more"),
    ],
)
def test_files_that_leave_no_stub_are_refused(halves: Manifest, source: str, said: str) -> None:
    with pytest.raises(MarkerError, match=said):
        strip_regions(source, "bad.py", "98", halves.task(1))


def test_a_goal_with_quotes_and_backslashes_still_gives_python(halves: Manifest) -> None:
    goal = 'Say "\\n", then \\ and {braces}.'
    source = "def f():\n    # BEGIN SOLUTION\n    return 1\n    # END SOLUTION\n"
    namespace: dict[str, object] = {}
    exec(strip_regions(source, "f.py", "98", replace(halves.task(1), goal=goal)), namespace)
    function = namespace["f"]
    assert callable(function)
    with pytest.raises(NotImplementedError) as caught:
        function()
    assert goal in str(caught.value)


def test_a_module_of_two_tasks_is_refused(halves: Manifest) -> None:
    both = replace(halves, tasks=tuple(replace(task, modules=("numbers",)) for task in halves.tasks))
    with pytest.raises(ValueError, match="exactly one task, belongs to 2"):
        generate_stub(both, "numbers")


def test_a_missing_reference_is_named(halves: Manifest) -> None:
    (halves.solutions / "boxes.py").unlink()
    with pytest.raises(ValueError, match=r"boxes\.py is missing"):
        write_stubs(halves)
    assert not list(halves.folder.glob("*.py")), "a refused command wrote some stubs all the same"


def test_edited_files_are_kept_and_untouched_ones_renewed(halves: Manifest) -> None:
    assert {report.outcome for report in write_stubs(halves)} == {Outcome.WRITTEN}
    assert {report.outcome for report in write_stubs(halves)} == {Outcome.UNCHANGED}
    assert not stale_stubs(halves) and not outdated_edits(halves)

    mine = halves.folder / "numbers.py"
    mine.write_text(mine.read_text() + "\n# my thoughts\n")
    assert not outdated_edits(halves)
    edited = mine.read_text()
    for name in ("numbers", "boxes"):
        reference = halves.solutions / f"{name}.py"
        reference.write_text(
            reference.read_text().replace('"""H', '"""All h').replace('"""A box', '"""The box')
        )
    assert stale_stubs(halves) == [halves.folder / "boxes.py"]
    assert outdated_edits(halves) == [mine]
    outcomes = {report.path.name: report.outcome for report in write_stubs(halves)}
    assert outcomes == {"numbers.py": Outcome.KEPT, "boxes.py": Outcome.WRITTEN}
    assert mine.read_text() == edited

    assert write_stubs(halves, force=True)[0].outcome is Outcome.WRITTEN
    assert is_untouched(mine.read_text())


def test_a_file_without_the_header_counts_as_edited() -> None:
    assert not is_untouched("")
    assert not is_untouched("x = 1\n")
    assert not is_untouched("# Generated (mark 0123456789abcdef)\nx = 1\n")


@pytest.mark.parametrize("lab_id", available_labs())
def test_the_labs_own_stubs_are_sound(lab_id: str) -> None:
    manifest = load_manifest(lab_id)
    for module in manifest.modules:
        stub = generate_stub(manifest, module)
        assert is_untouched(stub) and "SOLUTION" not in stub
        raised = [line for line in stub.splitlines() if NOT_ATTEMPTED_MARKER in line]
        assert raised and all(len(line) <= WIDTH for line in raised)
