"""A made-up manifest, so that the parts of the grader are tested without running a lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.manifest import Interface, Manifest, Task


def task(number: int, *tests: str, requires: tuple[int, ...] = (), module: str = "") -> Task:
    """A task of ten points."""
    return Task(number, f"task {number}", "Do it.", 10, requires, (module or f"part{number}",), tests, ("hint",))


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Two tasks in two modules; the second one builds on the first."""
    return Manifest(
        id="98",
        title="made up",
        folder=tmp_path / "labs" / "98_made_up",
        solutions=tmp_path / "solutions" / "made_up",
        modules=("part1", "part2"),
        banned=(),
        tasks=(task(1, "test_a", "test_b", "test_c"), task(2, "test_d", "test_joined", requires=(1,))),
        interface=Interface({"f": "part1", "g": "part2"}, {}),
    )
