"""A toy lab in a small workbook of its own, for what notebooks do with a lab."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from labkit.manifest import ROOT, Manifest, load_manifest

TOY_MANIFEST = """
[lab]
id = "98"
title = "toy"
solutions = "toy"
modules = ["sums", "boxes"]

[[task]]
number = 1
title = "Sums"
goal = "Add."
points = 10
modules = ["sums"]
tests = ["test_add", "test_add_negative"]
hints = ["a nudge", "a push", "the answer, nearly"]

[[task]]
number = 2
title = "Boxes"
goal = "Fill boxes."
points = 5
requires = [1]
modules = ["boxes"]
tests = ["test_box"]
hints = ["think", "think harder", "write"]
stretch = true

[interface.functions]
add = "sums"

[interface.classes.Box]
module = "boxes"
methods = ["put"]
"""
TOY_SUITE = """
import pytest

@pytest.mark.task(1)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_add(lab, number):
    assert lab.add(number, 2) == number + 2, "<b>addition</b> is off"

@pytest.mark.task(1)
def test_add_negative(lab):
    assert lab.add(-1, -2) == -3

@pytest.mark.task(2)
def test_box(lab):
    assert lab.Box().put(1) == 1
"""
TOY_SUMS = "def add(a, b):\n    return a + b\n"
TOY_BOXES = """from .sums import add

class Box:
    def __init__(self): self.count = 0
    def put(self, item):
        self.count = add(self.count, 1)
        return self.count
"""
TOY_STUB = '''def add(a, b):
    """Add."""
    raise NotImplementedError("lab 98 task 1: add is not written yet. Add. Stuck? make hint LAB=98 TASK=1")
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Lab 98, whose student has written boxes.py but not sums.py; its results go to a cache of its own."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "workbook"
    shutil.copytree(ROOT / "labkit", root / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    folder, solutions = root / "labs" / "98_toy", root / "solutions" / "toy"
    (folder / "tests").mkdir(parents=True)
    solutions.mkdir(parents=True)
    (folder / "lab.toml").write_text(TOY_MANIFEST)
    (folder / "tests" / "test_toy.py").write_text(TOY_SUITE)
    for place, sums in ((folder, TOY_STUB), (solutions, TOY_SUMS)):
        (place / "sums.py").write_text(sums)
        (place / "boxes.py").write_text(TOY_BOXES)
    return load_manifest("98", root)
