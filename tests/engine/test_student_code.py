"""The engine on a student's files: what is written is used and shows, what is not is the reference's, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.manifest import ROOT, load_manifest
from solutions.student_code import VARIABLE, StudentCode, choose_parts

LAB = load_manifest("07")


def run(code: str, folder: Path | None = None) -> str:
    """The output of a process of its own, with the files of `folder` as the student's lab 07."""
    script = (
        f"import labkit.manifest, pathlib\nfrom solutions.student_code import StudentCode, choose_parts\n"
        f"parts = choose_parts({str(folder)!r}, ['07'], trust=True)\nStudentCode(parts).install()\n"
        if folder is not None
        else ""
    )
    done = subprocess.run(
        [sys.executable, "-c", script + code], capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def student(folder: Path, **files: str) -> Path:
    """A folder of untouched stubs, but for the given files."""
    folder.mkdir()
    for module in LAB.modules:
        (folder / f"{module}.py").write_text((LAB.folder / f"{module}.py").read_text("utf-8"), "utf-8")
    for module, text in files.items():
        (folder / f"{module}.py").write_text(text, "utf-8")
    return folder


def test_untouched_stubs_leave_everything_to_the_reference(tmp_path: Path) -> None:
    parts = choose_parts(str(student(tmp_path / "mine")), ["07"], trust=True)
    assert [part.module for part in parts] == list(LAB.modules)
    assert not any(part.is_student for part in parts)
    assert all("not written yet" in part.why and part.path.parent == LAB.solutions for part in parts)


def test_a_finished_file_changes_what_the_engine_does(tmp_path: Path) -> None:
    """The student's allocator hands out the highest block first; nothing else differs."""
    text = (LAB.solutions / "blocks.py").read_text("utf-8")
    assert "self._free.popleft()" in text
    folder = student(tmp_path / "mine", blocks=text.replace("self._free.popleft()", "self._free.pop()"))
    code = (
        "from solutions.engine.kv_manager import KVManager\n"
        "table = KVManager(8, 4).new_table()\ntable.append(1)\nprint(table.blocks)\n"
        "import solutions.kv_cache.blocks as blocks; print(blocks.__file__)\n"
    )
    assert run(code).splitlines() == ["[0]", str(LAB.solutions / "blocks.py")]
    assert run(code, folder).splitlines() == ["[7]", str(folder / "blocks.py")]


def test_a_file_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    folder = student(tmp_path / "mine", blocks="def (:\n")
    (folder / "prefix.py").unlink()
    why = {part.module: part.why for part in choose_parts(str(folder), ["07"], trust=True)}
    assert "no Python" in why["blocks"] and why["prefix"] == "is missing"


def test_what_was_imported_already_cannot_be_replaced(tmp_path: Path) -> None:
    import solutions.kv_cache.blocks  # noqa: F401

    text = (LAB.solutions / "blocks.py").read_text("utf-8")
    parts = choose_parts(str(student(tmp_path / "mine", blocks=text)), ["07"], trust=True)
    with pytest.raises(ValueError, match=r"solutions\.kv_cache\.blocks had been imported"):
        StudentCode(parts).install()


def test_the_command_line_says_whose_code_it_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: "labs", "COLUMNS": "120"}
    command = [sys.executable, "-m", "solutions.engine", "generate", "Once", "--max-tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "whose code this is" in done.stdout and "blocks.py" in done.stdout
    environment[VARIABLE] = "theirs"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 2 and "allowed are labs and solutions" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("wrong", "right", "named"),
    [
        ("class BlockPool", "1 / 0\n\n\nclass BlockPool", "ZeroDivisionError"),
        ("class BlockPool", "class Pool", "BlockPool"),
        ("self._free.popleft()", "1 // 0", "ZeroDivisionError"),
        ("self._free.popleft()", "(self._free.popleft(), 1)", "TypeError"),
    ],
)
def test_a_fault_of_the_student_is_told_in_a_line(tmp_path: Path, wrong: str, right: str, named: str) -> None:
    text = (LAB.solutions / "blocks.py").read_text("utf-8")
    assert wrong in text
    folder = student(tmp_path / "mine", blocks=text.replace(wrong, right))
    # As `ENGINE_IMPL=labs` would, with files that are elsewhere.
    script = (
        "import runpy, sys, solutions.student_code as code\n"
        f"code.use_from_environment = lambda: (parts := code.choose_parts({str(folder)!r}, ['07'], trust=True), "
        "code.StudentCode(parts).install())[0]\n"
        "sys.argv = ['-m', 'generate', 'Once', '--max-tokens', '2']\n"
        "runpy.run_module('solutions.engine', run_name='__main__', alter_sys=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error ")]
    assert done.returncode == 2 and len(told) == 1, done.stdout + done.stderr
    assert named in told[0] and "make test-lab07" in told[0] and "Traceback" not in done.stderr
