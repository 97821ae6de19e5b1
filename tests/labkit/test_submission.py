"""`make submit`: what is packed is what the grader takes in, the same bytes each time, whether tests pass or not."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from grader.intake import find_entries, take_in
from labkit import submission
from labkit.manifest import Manifest, load_manifest
from labkit.submission import MAX_MODULE_BYTES, NotPacked, modules_sha256, pack, read_modules
from tests.small_workbook import BOXES, NUMBERS, copy_labkit, write_lab

KNOWN = "78e55b3ed226f30afe9fda454d87e574cc961729cdb6e41203babcb18fb51785"


@pytest.fixture
def workbook(tmp_path: Path) -> Path:
    """A workbook with lab 98, all of it written."""
    root = tmp_path / "workbook"
    root.mkdir()
    copy_labkit(root)
    write_lab(root)
    for name, text in (("numbers", NUMBERS), ("boxes", BOXES)):
        (root / "labs" / "98_halves" / f"{name}.py").write_text(text)
    return root


@pytest.fixture
def lab(workbook: Path) -> Manifest:
    """Its lab."""
    return load_manifest("98", workbook)


def submit(workbook: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as the Makefile does."""
    command = [sys.executable, "-m", "labkit.submission", "--lab", "98", *options]
    environment = {**os.environ, "PYTHONPATH": str(workbook)}
    return subprocess.run(
        command, cwd=workbook, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def archive(workbook: Path) -> Path:
    """What it wrote."""
    (path,) = (workbook / ".out" / "submit").iterdir()
    return path


def test_a_complete_lab_is_tested_packed_and_taken_in(workbook: Path, lab: Manifest, tmp_path: Path) -> None:
    (lab.folder / "notes.txt").write_text("mine")
    result = submit(workbook, "--name", "ada")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "15 of 15 points" in result.stdout and "do not pass" not in result.stdout
    path = archive(workbook)
    assert path.name == "lab98-ada.zip" and str(path) in result.stdout
    assert f"({path.stat().st_size:,} bytes)" in result.stdout
    assert hashlib.sha256(path.read_bytes()).hexdigest() in result.stdout
    with zipfile.ZipFile(path) as packed:
        assert packed.namelist() == ["boxes.py", "numbers.py"]

    (tmp_path / "taken").mkdir()
    ((name, entry),) = find_entries(path.parent).items()
    taken = take_in(name, entry, lab, tmp_path / "taken")
    assert taken.refusal is None and taken.ignored == () and name == "lab98-ada"
    assert taken.folder is not None
    assert {file.name: file.read_text() for file in taken.folder.iterdir()} == {
        "numbers.py": NUMBERS,
        "boxes.py": BOXES,
    }
    assert taken.sha256 in result.stdout, "a student cannot tell that the grader's report is about these files"


def test_failing_tests_are_said_and_packed_all_the_same(workbook: Path, lab: Manifest) -> None:
    (lab.folder / "numbers.py").write_text(NUMBERS.replace("number // 2", "(number + 1) // 2"))
    result = submit(workbook)
    assert result.returncode == 0, result.stderr
    assert "10 of 15 points" in result.stdout and "1 tests do not pass" in result.stdout
    assert "5 of 10 points" in result.stdout, "a function counts only if all of its cases pass"
    assert archive(workbook).name == "lab98.zip"


def test_code_that_ends_its_process_is_packed_too(workbook: Path, lab: Manifest) -> None:
    (lab.folder / "boxes.py").write_text("import os\nos._exit(0)\n")
    result = submit(workbook)
    assert result.returncode == 0, result.stderr
    assert "ended early" in result.stdout and "10 of 15 points" in result.stdout
    assert archive(workbook).is_file()


def test_missing_files_are_named_and_nothing_is_packed(workbook: Path, lab: Manifest) -> None:
    assert submit(workbook, "--no-tests").returncode == 0
    archive(workbook).unlink()
    (lab.folder / "boxes.py").unlink()
    (lab.folder / "numbers.py").unlink()
    result = submit(workbook)
    assert result.returncode == 2
    assert "numbers.py, boxes.py" in result.stderr and "Traceback" not in result.stderr
    assert "points" not in result.stdout, "tests ran although nothing can be packed"
    assert not list((workbook / ".out" / "submit").iterdir())


def test_links_and_large_files_are_refused(lab: Manifest, tmp_path: Path) -> None:
    assert set(read_modules(lab, lab.folder)) == {"numbers", "boxes"}
    (tmp_path / "elsewhere.py").write_text(NUMBERS)
    (lab.folder / "numbers.py").unlink()
    (lab.folder / "numbers.py").symlink_to(tmp_path / "elsewhere.py")
    (lab.folder / "boxes.py").write_bytes(b"#" * (MAX_MODULE_BYTES + 1))
    with pytest.raises(NotPacked, match=r"numbers\.py is a link.*boxes\.py is larger than 1 MiB"):
        read_modules(lab, lab.folder)
    (lab.folder / "boxes.py").unlink()
    (lab.folder / "boxes.py").mkdir()
    with pytest.raises(NotPacked, match=r"boxes\.py is a link or no file"):
        read_modules(lab, lab.folder)


def test_banned_names_are_said(workbook: Path, lab: Manifest) -> None:
    (lab.folder / "numbers.py").write_text(f"from math import trunc\n{NUMBERS.replace('from __future__ ', '# ')}")
    result = submit(workbook, "--no-tests")
    assert result.returncode == 0 and "numbers.py:1 uses math.trunc" in result.stdout


def test_equal_files_give_equal_bytes_whatever_their_dates(lab: Manifest) -> None:
    first = pack(read_modules(lab, lab.folder))
    for path in lab.folder.glob("*.py"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        path.chmod(0o600)
    assert pack(read_modules(lab, lab.folder)) == first
    # Known once and for all: no compressor, system or Python version has a say in it.
    assert hashlib.sha256(pack({"b": b"2\n", "a": b"1\n"})).hexdigest() == KNOWN
    assert pack({"a": b"1\n", "b": b"2\n"}) == pack({"b": b"2\n", "a": b"1\n"})


def test_the_hash_of_the_files_depends_on_names_and_contents() -> None:
    hashes = [
        modules_sha256(modules)
        for modules in ({"a": b"x", "b": b"y"}, {"a": b"x", "b": b"z"}, {"a": b"xb.py 1\ny"}, {"c": b"x", "b": b"y"})
    ]
    assert len(set(hashes)) == 4


def test_an_edit_while_the_tests_run_is_noticed(lab: Manifest, workbook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke = in_process(lab, monkeypatch)
    done = submission.LocalRun(())
    monkeypatch.setattr(submission, "run_tests", lambda *args, **options: done)
    assert invoke("--out", str(workbook / "out"))[0] == 0

    def edit(*args: object, **options: object) -> submission.LocalRun:
        (lab.folder / "boxes.py").write_text(BOXES + "\n")
        return done

    monkeypatch.setattr(submission, "run_tests", edit)
    code, said = invoke("--out", str(workbook / "other"))
    assert code == 2 and "edited while its tests ran" in said
    assert not (workbook / "other").exists()


def test_an_interruption_packs_nothing_and_says_how_to_go_without(
    lab: Manifest, workbook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> submission.LocalRun:
        raise KeyboardInterrupt

    invoke = in_process(lab, monkeypatch)
    monkeypatch.setattr(submission, "run_tests", interrupted)
    code, said = invoke("--out", str(workbook / "out"))
    assert code == 130 and "--no-tests" in said
    assert not (workbook / "out").exists()


@pytest.mark.parametrize("name", ["../up", "a b", "-x", "ä", "a/b", "x" * 100])
def test_names_that_are_no_file_names_are_refused(name: str, lab: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = in_process(lab, monkeypatch)(f"--name={name}", "--no-tests")
    assert code == 2 and "NAME=" in said


def test_an_unknown_lab_is_refused(tmp_path: Path) -> None:
    app = Typer()
    app.command()(submission.main)
    result = CliRunner().invoke(app, ["--lab", "99", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "no lab '99'" in result.output
    assert not (tmp_path / "out").exists()


def in_process(lab: Manifest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Runs the command on a lab in this process; gives exit code and what it said."""
    monkeypatch.setattr(submission, "load_manifest", lambda lab_id: lab)
    app = Typer()
    app.command()(submission.main)

    def invoke(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["--lab", "98", *options])
        return result.exit_code, result.output

    return invoke
