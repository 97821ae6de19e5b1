"""A workbook of one lab with two modules, small enough to be made anew for a test: lab 98, halves."""

from __future__ import annotations

import shutil
from pathlib import Path

from labkit.manifest import ROOT

MANIFEST = """
[lab]
id = "98"
title = "halves"
solutions = "halves"
modules = ["numbers", "boxes"]
banned = ["math.trunc"]

[[task]]
number = 1
title = "Halve numbers"
goal = "Halve what is given."
points = 10
modules = ["numbers"]
tests = ["test_half", "test_half_of_zero"]
hints = ["a", "b", "c"]

[[task]]
number = 2
title = "Fill boxes"
goal = "Keep things."
points = 5
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


def half(number: int) -> int:
    """Half of a number, rounded down.

    Args:
        number: at least 0.
    """
    if number < 0:
        raise ValueError(f"number must be at least 0, got {number}")
    # BEGIN SOLUTION
    return number // 2
    # END SOLUTION


def double(number: int) -> int:
    """Twice a number, which is given."""
    return 2 * number
'''

BOXES = '''"""Boxes."""

from __future__ import annotations


class Box:
    """A box."""

    def __init__(self) -> None:
        self._things: list[int] = []

    @property
    def size(self) -> int:
        """How much is in it."""
        # BEGIN SOLUTION
        return len(self._things)
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
    assert lab.half(number + 2) == number // 2 + 1

@pytest.mark.task(1)
def test_half_of_zero(lab):
    assert lab.half(0) == 0

@pytest.mark.task(2)
def test_box(lab):
    box = lab.Box()
    box.put(3)
    assert box.size == 1
"""


def write_lab(root: Path, numbers: str = NUMBERS, boxes: str = BOXES) -> None:
    """Writes lab 98 and its reference; stubs are left to whoever wants them."""
    folder, solutions = root / "labs" / "98_halves", root / "solutions" / "halves"
    for made in (folder / "tests", solutions):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "lab.toml").write_text(MANIFEST)
    (folder / "tests" / "test_halves.py").write_text(TESTS)
    (solutions / "numbers.py").write_text(numbers)
    (solutions / "boxes.py").write_text(boxes)


def copy_labkit(root: Path) -> None:
    """Makes a workbook that runs: with labkit and the settings of pytest."""
    shutil.copytree(ROOT / "labkit", root / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
