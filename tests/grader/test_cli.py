"""The command line: exit codes, and a sentence instead of a traceback for a user's mistake."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import grader.isolation.sandbox as sandbox
from grader.cli import app
from labkit.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[2]
RUN = CliRunner()


def refused(*arguments: str) -> str:
    """Runs a command that must end with code 2 and without a traceback; what it said."""
    result = RUN.invoke(app, list(arguments))
    text = " ".join(result.output.split())
    assert result.exit_code == 2, f"exit code {result.exit_code}: {text}"
    assert "Traceback" not in text
    return text


def grading(tmp_path: Path, *more: str, submissions: str = "subs", lab: str = "07") -> list[str]:
    """Arguments of `grade`."""
    places = ["--submissions", str(tmp_path / submissions), "--out", str(tmp_path / "out")]
    return ["grade", "--lab", lab, *places, *more]


@pytest.fixture
def subs(tmp_path: Path) -> Path:
    """A folder with one submission."""
    (tmp_path / "subs" / "ada").mkdir(parents=True)
    return tmp_path / "subs"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "nowhere is no folder" in refused(*grading(tmp_path, submissions="nowhere"))
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "subs").mkdir()
    assert "is empty" in refused(*grading(tmp_path))


def test_an_unknown_lab_is_refused_with_those_that_exist(tmp_path: Path, subs: Path) -> None:
    text = refused(*grading(tmp_path, lab="99"))
    assert "no lab '99'" in text and "07" in text


def test_an_unknown_submission_is_refused_with_those_that_exist(tmp_path: Path, subs: Path) -> None:
    text = refused(*grading(tmp_path, "--only", "bob"))
    assert "bob" in text and "ada" in text


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path, subs: Path) -> None:
    (tmp_path / "out").write_text("a file of that name")
    assert "out" in refused(*grading(tmp_path))
    assert (tmp_path / "out").read_text() == "a file of that name"


def test_without_a_sandbox_it_says_what_to_install_and_the_flag(
    tmp_path: Path, subs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "bwrap_fault", lambda: "bubblewrap is not installed; install it with: apt-get it")
    text = refused(*grading(tmp_path))
    assert "apt-get it" in text and "--no-sandbox" in text
    assert not (tmp_path / "out").exists()


def test_hints_come_one_level_at_a_time() -> None:
    hints = load_manifest("07").task(4).hints
    first = RUN.invoke(app, ["hint", "07", "4"])
    assert first.exit_code == 0
    shown = " ".join(first.output.split())
    assert hints[0] in shown and hints[1] not in shown and "LEVEL=2" in shown
    last = " ".join(RUN.invoke(app, ["hint", "07", "4", "--level", "3"]).output.split())
    assert hints[2] in last and "LEVEL=4" not in last


@pytest.mark.parametrize("wrong", [("07", "99"), ("99", "1"), ("07", "4", "--level", "4"), ("07", "4", "--level", "0")])
def test_hints_that_do_not_exist_are_refused(wrong: tuple[str, ...]) -> None:
    assert "error" in refused("hint", *wrong)


def test_samples_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    text = refused("samples", "--lab", "07", "--out", str(tmp_path / "s"), "--only", "blank", "--only", "friendly")
    assert "ordinary" in text and "hostile" in text and "half_done" in text
    assert not (tmp_path / "s").exists()


def test_samples_are_written_by_name_by_kind_and_the_quick_ones(tmp_path: Path) -> None:
    def written(name: str, *options: str) -> set[str]:
        result = RUN.invoke(app, ["samples", "--lab", "07", "--out", str(tmp_path / name), *options])
        assert result.exit_code == 0, result.output
        return {path.name.removesuffix(".zip") for path in (tmp_path / name).iterdir()}

    every, hostile = written("all"), written("hostile", "--only", "hostile")
    assert written("named", "--only", "blank", "--only", "climbs_out") == {"blank", "climbs_out"}
    assert "climbs_out" in hostile and "blank" not in hostile and hostile < every
    quick = written("quick", "--quick")
    assert 6 <= len(quick) <= 10 and {"complete", "blank", "half_done"} < quick
    assert len(quick & hostile) >= 3, "the demo shows what becomes of hostile submissions"


def test_a_folder_without_modules_is_graded_and_needs_a_person(tmp_path: Path, subs: Path) -> None:
    if fault := sandbox.bwrap_fault():
        pytest.skip(f"not verified here: {fault}")
    run = subprocess.run(
        [sys.executable, "-m", "grader", *grading(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 3, run.stderr
    assert "ada" in run.stdout and "results.csv" in run.stdout
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["name"], row["total"], row["task 1"], row["needs_review"]) == ("ada", "0", "0", "yes")
    assert row["flags"].startswith("nothing to grade: none of sizing.py, cache.py")
