"""`open_lab`: the student's modules where they are written, the reference's elsewhere, and which is which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.loader import LabPackage
from labkit.manifest import Manifest
from labkit.notebook.mixed_lab import MixedLab
from labkit.notebook.written import is_written


@pytest.fixture(autouse=True)
def unmounted() -> Iterator[None]:
    """Forgets the toy lab."""
    yield
    LabPackage("lab98", Path(__file__).parent, ()).mount()


def test_unwritten_modules_come_from_the_reference_and_siblings_meet(toy: Manifest) -> None:
    lab = MixedLab(toy, "labs")
    assert lab.add(1, 2) == 3, "the stub was called"
    box = lab.Box()
    assert box.put("x") == 1
    assert type(box).put.__code__.co_filename == str(toy.folder / "boxes.py"), "not the student's box"
    assert lab.whose(toy.task(1)) == "the reference" and lab.whose(toy.task(2)) == "your code"
    for face in (str(lab), lab._repr_html_()):
        assert "the reference" in face and "your code" in face


def test_opening_again_reads_edited_files(toy: Manifest) -> None:
    (toy.folder / "sums.py").write_text("def add(a, b):\n    return 7\n")
    lab = MixedLab(toy, "labs")
    assert lab.add(1, 2) == 7 and lab.Box().put("x") == 7, "the box does not use the student's sums"
    (toy.folder / "sums.py").write_text("def add(a, b):\n    return 8\n")
    assert MixedLab(toy, "labs").add(1, 2) == 8


def test_the_reference_alone(toy: Manifest) -> None:
    lab = MixedLab(toy, "solutions")
    assert type(lab.Box()).put.__code__.co_filename == str(toy.solutions / "boxes.py")
    assert "your code" not in str(lab)


def test_without_a_reference_the_stub_names_its_task(toy: Manifest) -> None:
    for file in toy.solutions.iterdir():
        file.unlink()
    toy.solutions.rmdir()
    with pytest.raises(NotImplementedError, match="lab 98 task 1"):
        MixedLab(toy, "labs").add(1, 2)


def test_a_task_of_two_modules_says_which_is_whose(toy: Manifest) -> None:
    both = toy.task(1).__class__(**{**vars(toy.task(1)), "modules": ("sums", "boxes")})
    assert MixedLab(toy, "labs").whose(both) == "your code (boxes), the reference (sums)"


def test_names_outside_the_interface_are_refused_with_those_inside(toy: Manifest) -> None:
    lab = MixedLab(toy, "labs")
    assert callable(lab.add)
    with pytest.raises(AttributeError, match="lab 98 has no 'subtract'; it has: Box, add"):
        _ = lab.subtract
    with pytest.raises(ValueError, match="no such folder"):
        MixedLab(toy, "nowhere")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("def f(): return 1", True),
        ("# this is not written yet, or so I thought\ndef f(): return 1", True),
        ('def f():\n    "not written yet"\n    return 1', True),
        ('def f(): raise NotImplementedError("lab 98 task 1: f is not written yet.")', False),
        ('def f(): raise NotImplementedError(\n    "lab 98 task 1: f is not "\n    "written yet.")', False),
        ('def kernel(): tl.static_assert(False, "lab 98 task 1: kernel is not written yet.")', False),
        ("def f(: return 1", False),
    ],
)
def test_a_stub_is_told_by_its_text(text: str, written: bool, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(text)
    assert is_written(file) is written
    assert not is_written(tmp_path / "missing.py")
