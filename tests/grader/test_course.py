"""`course.toml`: weights and deadlines count as written, and whatever cannot be meant is refused by name."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grader.cli import app
from grader.course import CourseError, Terms, handed_in, read_terms
from grader.reports.csv_report import write_csv
from grader.reports.json_report import write_json
from grader.verdicts import SubmissionResult, Verdict, same_for_all
from labkit.manifest import ROOT, Manifest
from tests.small_workbook import write_lab

DUE = datetime(2027, 2, 1, 22, 59, tzinfo=UTC)
WHOLE = """
[lab.98]
deadline = 2027-02-01T23:59:00+01:00
late_percent_per_day = 10
late_percent_at_most = 25
[lab.98.weights]
1 = 30
[lab.98.extensions]
ada = 2027-02-08T23:59:00+01:00
"""


@pytest.fixture
def course(manifest: Manifest, tmp_path: Path) -> Path:
    """A course file beside a lab 98 that exists."""
    write_lab(tmp_path)
    (tmp_path / "labs" / "98_halves").rename(manifest.folder)
    return tmp_path / "course.toml"


def entry(tmp_path: Path, time: datetime) -> Path:
    """An archive that was changed at a time."""
    path = tmp_path / "bob.zip"
    path.touch()
    os.utime(path, (time.timestamp(), time.timestamp()))
    return path


def right(manifest: Manifest, name: str = "bob") -> SubmissionResult:
    """A submission that passes everything."""
    return SubmissionResult(name, "ab" * 32, same_for_all(manifest, Verdict.PASSED, ""))


def test_without_a_file_and_with_the_one_that_is_shipped_nothing_changes(course: Path, manifest: Manifest) -> None:
    assert read_terms(course, manifest) == Terms() and Terms().facts() == {}
    assert read_terms(ROOT / "course.toml", manifest) == Terms()
    assert Terms().weigh(manifest) == manifest
    assert Terms().judge(right(manifest), course.parent / "nowhere") == right(manifest)


def test_the_shipped_examples_are_right_once_uncommented(course: Path, manifest: Manifest) -> None:
    text = (ROOT / "course.toml").read_text().replace("lab.07", "lab.98").replace("8 = 50", "2 = 50")
    lines = [
        line.removeprefix("# ")
        for line in text.splitlines()
        if line.startswith(("# [", "# d", "# l", "# 1", "# 2", "# ada"))
    ]
    course.write_text("\n".join(lines))
    terms = read_terms(course, manifest)
    assert terms.weights == {1: 10, 2: 50} and terms.deadline == DUE and set(terms.extensions) == {"ada"}
    assert (terms.late_percent_per_day, terms.late_percent_at_most) == (10, 50)


def test_weights_take_the_place_of_points(course: Path, manifest: Manifest) -> None:
    course.write_text(WHOLE)
    weighed = read_terms(course, manifest).weigh(manifest)
    assert [task.points for task in weighed.tasks] == [30, 10] and weighed.points == 40
    assert right(weighed).points == 40
    assert [task.points for task in manifest.tasks] == [10, 10]


@pytest.mark.parametrize(
    ("late", "name", "percent"),
    [
        (timedelta(0), "bob", 0),
        (timedelta(seconds=1), "bob", 10),
        (timedelta(days=1), "bob", 10),
        (timedelta(days=1, seconds=1), "bob", 20),
        (timedelta(days=9), "bob", 25),
        (timedelta(days=6), "ada", 0),
        (timedelta(days=7, seconds=1), "ada", 10),
    ],
)
def test_lateness_costs_what_the_file_says(
    course: Path, manifest: Manifest, tmp_path: Path, late: timedelta, name: str, percent: int
) -> None:
    course.write_text(WHOLE)
    judged = read_terms(course, manifest).judge(right(manifest, name), entry(tmp_path, DUE + late))
    assert judged.penalty_percent == percent and judged.points == 20 * (1 - percent / 100)
    assert [f"{percent} % of its points" in flag for flag in judged.flags] == ([True] if percent else [])
    assert not judged.needs_review, "being late is no reason for a person to look"


def test_a_penalty_stands_in_the_reports(course: Path, manifest: Manifest, tmp_path: Path) -> None:
    course.write_text(WHOLE)
    terms = read_terms(course, manifest)
    judged = terms.judge(right(manifest), entry(tmp_path, DUE + timedelta(hours=3)))
    write_json(tmp_path / "results.json", {"course": terms.facts()}, [judged])
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["submissions"][0]["points"] == 18 and report["submissions"][0]["penalty_percent"] == 10
    assert report["course"]["weights"] == {"1": 30} and report["course"]["deadline"] == "2027-02-01T23:59:00+01:00"
    write_csv(tmp_path / "results.csv", manifest, [judged])
    row = (tmp_path / "results.csv").read_text().splitlines()[1]
    assert row.startswith("bob,18,10,10,no,") and "2027-02-02 01:59 UTC" in row and "due 2027-02-01 22:59 UTC" in row


def test_a_folder_is_as_old_as_its_newest_file(tmp_path: Path) -> None:
    folder = tmp_path / "ada"
    (folder / "labs").mkdir(parents=True)
    for name, day in (("a.py", 3), ("labs/b.py", 5), ("c.py", 4)):
        (folder / name).touch()
        time = datetime(2027, 1, day, tzinfo=UTC).timestamp()
        os.utime(folder / name, (time, time))
    assert handed_in(folder) == datetime(2027, 1, 5, tzinfo=UTC)
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    assert handed_in(folder) == datetime(2027, 1, 5, tzinfo=UTC), "a link that leads nowhere is passed over"


def test_an_unreadable_time_is_a_remark_and_no_crash(course: Path, manifest: Manifest, tmp_path: Path) -> None:
    course.write_text(WHOLE)
    judged = read_terms(course, manifest).judge(right(manifest), tmp_path / "gone.zip")
    assert judged.points == 20 and "not known" in judged.flags[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[lab.99]", r"lab has no '99'; allowed: 98"),
        ("[labs.98]", r"the file has no 'labs'; allowed: lab"),
        ("[lab.98.weights]\n3 = 5", r"lab\.98\.weights has no '3'; allowed: 1, 2"),
        ("[lab.98.weights]\n1 = 0", r"lab\.98\.weights\.1 must be above 0"),
        ("[lab.98.weights]\n1 = nan", r"lab\.98\.weights\.1 must be above 0"),
        ("[lab.98.weights]\n1 = true", r"must be a number, got True"),
        ("[lab.98]\nweights = 3", r"lab\.98\.weights must be a table, got 3"),
        ("[lab.98]\ndeadlin = 3", r"lab\.98 has no 'deadlin'; allowed: weights, deadline"),
        ("[lab.98]\ndeadline = 2027-02-01T23:59:00", r"lab\.98\.deadline must be a time with its offset"),
        ("[lab.98]\ndeadline = 2027-02-01", r"lab\.98\.deadline must be a time with its offset"),
        ("[lab.98]\nlate_percent_per_day = 10", r"lab\.98\.late_percent_per_day needs a lab\.98\.deadline"),
        ("[lab.98]\ndeadline = 2027-02-01T23:59:00Z\nlate_percent_per_day = 101", r"from 0 to 100, got 101"),
        ("[lab.98]\ndeadline = 2027-02-01T23:59:00Z\nextensions.ada = 3", r"lab\.98\.extensions\.ada must be a time"),
        ("lab = 98", r"lab must be a table, got 98"),
        ("[lab", r"course\.toml"),
    ],
)
def test_what_cannot_be_meant_is_refused(course: Path, manifest: Manifest, text: str, said: str) -> None:
    course.write_text(WHOLE)
    assert read_terms(course, manifest).deadline == DUE
    course.write_text(text)
    with pytest.raises(CourseError, match=said):
        read_terms(course, manifest)


def test_grading_refuses_a_wrong_file_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "subs" / "ada").mkdir(parents=True)
    (tmp_path / "course.toml").write_text("[lab.07.weights]\n99 = 1\n")
    places = ["--submissions", str(tmp_path / "subs"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["grade", "--lab", "07", *places, "--course", str(tmp_path / "course.toml")])
    assert result.exit_code == 2 and "no '99'" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
