"""What a student sees: a copy of labkit with a toy lab, run by pytest as `make test-lab99` would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.manifest import ROOT, Manifest

SUITE = """
import pytest

@pytest.mark.task(1)
def test_add(lab):
    assert lab.add(1, 2) == 3

@pytest.mark.task(2)
def test_box(lab):
    assert len(lab.Box()) == 0

@pytest.mark.task(2)
@pytest.mark.integration
def test_box_uses_add(lab):
    assert lab.Box().put(1) == 1
"""

STUB = "raise NotImplementedError('lab 99 task 1: add is not written yet. Add. Stuck? make hint LAB=99 TASK=1')"


@pytest.fixture
def workbook(toy: Manifest, tmp_path: Path) -> Path:
    """A small workbook whose student has done nothing wrong yet."""
    shutil.copytree(ROOT / "labkit", tmp_path / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    toy.tests_folder.mkdir()
    (toy.tests_folder / "test_toy.py").write_text(SUITE)
    for name in toy.modules:
        shutil.copy(toy.solutions / f"{name}.py", toy.folder)
    return tmp_path


def run(workbook: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of pytest on the toy lab's suite."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "labkit.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--import-mode=importlib", str(workbook / "labs" / "99_toy" / "tests"), *options],
        cwd=workbook,
        env={**os.environ, "PYTHONPATH": str(workbook), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def edit(workbook: Path, old: str, new: str, module: str = "sums") -> None:
    path = workbook / "labs" / "99_toy" / f"{module}.py"
    path.write_text(path.read_text().replace(old, new))


def test_a_complete_lab_is_green_and_counted_by_task(workbook: Path) -> None:
    code, output = run(workbook)
    assert code == 0 and "3 passed" in output
    assert "task  1" in output and "1/1" in output and "2/2" in output and output.count("done") == 2


def test_an_untouched_stub_is_named_without_a_traceback_and_blocks_what_needs_it(workbook: Path) -> None:
    edit(workbook, "def add(a, b): return a + b", f"def add(a, b): {STUB}")
    code, output = run(workbook)
    assert code == 1 and "2 failed, 1 passed" in output, output
    assert "lab 99 task 1: add is not written yet. Add." in output and "client.py" not in output
    assert "blocked by task 1" in output and "not attempted" in output


def test_a_wrong_answer_shows_the_assertion_and_the_way_on(workbook: Path) -> None:
    edit(workbook, "return a + b", "return a - b")
    code, output = run(workbook)
    assert code == 1 and "assert -1 == 3" in output and "make hint LAB=99 TASK=1" in output


def test_task_selects_its_tests_and_refuses_others(workbook: Path) -> None:
    code, output = run(workbook, "--task", "2")
    assert code == 0 and "2 passed, 1 deselected" in output
    code, output = run(workbook, "--task", "9")
    assert code == 4 and "TASK=9: no such task; allowed: 1, 2" in output


def test_the_reference_runs_by_name_and_a_stranger_needs_trust(workbook: Path, tmp_path_factory: object) -> None:
    edit(workbook, "return a + b", "return a - b")
    assert run(workbook, "--impl", "solutions")[0] == 0
    outside = workbook.parent / "stranger"
    shutil.copytree(workbook / "solutions" / "toy", outside)
    code, output = run(workbook, "--impl", str(outside))
    assert code == 4 and "make grade" in output and "Traceback" not in output and len(output.splitlines()) < 10
    assert run(workbook, "--impl", str(outside), "--trust")[0] == 0
    code, output = run(workbook, "--impl", "nowhere")
    assert code != 0 and "no such folder" in output


def test_a_banned_name_fails_its_task_with_file_and_line(workbook: Path) -> None:
    edit(workbook, "def fill", "from torch.nn.functional import scaled_dot_product_attention\ndef fill")
    code, output = run(workbook)
    assert code == 1 and "sums.py:3 uses torch.nn.functional.scaled_dot_product_attention" in output
    assert "2 passed, 1 error" in output


def test_a_syntax_error_costs_only_the_tasks_of_its_module(workbook: Path) -> None:
    edit(workbook, "class Box:", "class Box", module="things")
    code, output = run(workbook)
    assert code == 1 and "1 passed" in output and "2 failed" in output and "things.py" in output
