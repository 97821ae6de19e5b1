"""A lab of two modules, small enough to see through, with a suite that runs in a moment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.manifest import Manifest, load_manifest

MANIFEST = """
[lab]
id = "98"
title = "halves"
solutions = "halves"
modules = ["numbers", "boxes"]

[[task]]
number = 1
title = "numbers"
goal = "Halve what is given."
points = 10
modules = ["numbers"]
tests = ["test_half"]
hints = ["a", "b", "c"]

[[task]]
number = 2
title = "boxes"
goal = "Keep things."
points = 10
requires = [1]
modules = ["boxes"]
tests = ["test_box"]
hints = ["a", "b", "c"]

[interface.functions]
half = "numbers"

[interface.classes.Box]
module = "boxes"
methods = ["put"]
properties = ["size"]
"""

NUMBERS = '''"""Halves."""

from __future__ import annotations

# BEGIN SOLUTION
import operator

# END SOLUTION


def half(number: int) -> int:
    """Half of a number, rounded down."""
    if number < 0:
        raise ValueError(f"number must be at least 0, got {number}")
    # BEGIN SOLUTION
    return operator.floordiv(number, 2)
    # END SOLUTION


# BEGIN SOLUTION
def _unused_helper() -> None:
    """Gone from the stub."""


# END SOLUTION
'''

BOXES = '''"""Boxes."""

from __future__ import annotations

from .numbers import half


class Box:
    """A box whose size is half of what was put in."""

    def __init__(self) -> None:
        self._things: list[int] = []

    @property
    def size(self) -> int:
        """Half of the number of things."""
        # BEGIN SOLUTION
        return half(len(self._things))
        # END SOLUTION

    def put(self, thing: int) -> None:
        """Put a thing in."""
        # BEGIN SOLUTION
        self._things.append(thing)
        # END SOLUTION
'''

TESTS = """
import pytest

@pytest.mark.task(1)
@pytest.mark.parametrize("number", [0, 7])
def test_half(lab, number):
    assert type(lab.half(number + 2)) is int and lab.half(number + 2) == number // 2 + 1
    with pytest.raises(ValueError):
        lab.half(-1)

@pytest.mark.task(2)
def test_box(lab):
    box = lab.Box()
    assert box.size == 0
    for thing in range(5):
        box.put(thing)
    assert box.size == 2
"""

CATALOGUE = """
[[misconception]]
name = "rounds-up"
find = "operator.floordiv(number, 2)"
replace = "operator.floordiv(number + 1, 2)"
explanation = "Rounds up."
question = "What is half of 7?"
"""


@pytest.fixture
def halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """The manifest of lab 98, whose suite the plugin finds as if the folder were the repository."""
    folder, solutions, catalogue = (
        tmp_path / name for name in ("labs/98_halves", "solutions/halves", "catalogue")
    )
    for made in (folder / "tests", solutions, catalogue):
        made.mkdir(parents=True)
    (folder / "lab.toml").write_text(MANIFEST)
    (folder / "tests" / "test_halves.py").write_text(TESTS)
    (solutions / "numbers.py").write_text(NUMBERS)
    (solutions / "boxes.py").write_text(BOXES)
    (catalogue / "numbers.toml").write_text(CATALOGUE)
    manifest = load_manifest("98", tmp_path)
    # The runs fork from this process, and so see what is patched here.
    monkeypatch.setattr("labkit.pytest_plugin.available_labs", lambda: {"98": folder})
    monkeypatch.setattr("labkit.pytest_plugin.load_manifest", lambda lab_id: manifest)
    return manifest


@pytest.fixture
def catalogue(halves: Manifest) -> Path:
    """Where the misconceptions of lab 98 lie."""
    return halves.folder.parent.parent / "catalogue"


@pytest.fixture
def in_own_process() -> Callable[[str, Path], subprocess.CompletedProcess[str]]:
    """Runs Python in a process that has never computed, as the runs need it."""

    def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )

    return run
