"""A small lab in a temporary folder, to change and to break."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from labkit.manifest import Manifest, load_manifest

REFERENCE = '''"""Counting."""

from __future__ import annotations

# BEGIN SOLUTION
from math import prod
# END SOLUTION


def count(sizes: list[int]) -> int:
    """How many numbers there are."""
    if not sizes:
        raise ValueError("sizes are missing")
    # BEGIN SOLUTION
    return prod(sizes) * len(["a single factor"])
    # END SOLUTION


class Box:
    """A box."""

    def volume(self, edge: int) -> int:
        """Of a cube."""
        # BEGIN SOLUTION
        return edge * edge * edge
        # END SOLUTION


# BEGIN SOLUTION
def _helper() -> None:
    """For the reference only."""


# END SOLUTION
'''

LAB_TOML = """
[lab]
id = "99"
title = "Counting"
folder = "99_counting"
solutions = "counting"
modules = ["counting"]

[interface.functions]
count = "counting"

[interface.classes.Box]
module = "counting"
methods = ["volume"]

[[task]]
number = 1
title = "Count"
points = 10
modules = ["counting"]
goal = "Count the numbers."
tests = ["test_count", "test_volume"]
hints = ["one", "two", "three"]
"""

TESTS = """
def test_count(lab):
    assert lab.count([2, 3]) == 6


def test_volume(lab):
    assert lab.Box().volume(2) == 8
"""


@dataclass(frozen=True)
class SmallLab:
    """The lab's manifest, and where its reference and its stub lie."""

    manifest: Manifest
    reference: Path
    stub: Path


@pytest.fixture
def small_lab(tmp_path: Path) -> SmallLab:
    """Lab 99 with one module and one task; no stub is written yet."""
    folder, solutions = tmp_path / "labs" / "99_counting", tmp_path / "solutions" / "counting"
    (folder / "tests").mkdir(parents=True)
    solutions.mkdir(parents=True)
    (folder / "lab.toml").write_text(LAB_TOML)
    (folder / "tests" / "test_counting.py").write_text(TESTS)
    (solutions / "counting.py").write_text(REFERENCE)
    return SmallLab(load_manifest("99", tmp_path), solutions / "counting.py", folder / "counting.py")
