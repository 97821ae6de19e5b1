"""Reports: complete, safe to open, the same for the same results, and never half written."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from grader.journal import Journal, read_journal
from grader.reports.csv_report import write_csv
from grader.reports.json_report import write_json
from grader.reports.live import LiveProgress
from grader.reports.table import remark_lines, results_table
from grader.verdicts import CaseResult, SubmissionResult, Verdict, same_for_all, task_results
from labkit.manifest import Manifest


@pytest.fixture
def results(manifest: Manifest) -> list[SubmissionResult]:
    """One good submission, one refused with a name and a reason made to do harm."""
    good = SubmissionResult("ada", "ab" * 32, same_for_all(manifest, Verdict.PASSED, ""), ("notes.txt",))
    reason = '=HYPERLINK("http://x")\n[bold]"; rm'
    bad = SubmissionResult("=cmd()", "", same_for_all(manifest, Verdict.REFUSED, reason), (), (reason,))
    return [good, bad]


def test_json_holds_everything(manifest: Manifest, results: list[SubmissionResult], tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {"lab": "98", "seed": 3}, results)
    report = json.loads((tmp_path / "results.json").read_text())
    assert (report["schema_version"], report["lab"], report["seed"]) == (1, "98", 3)
    ada, bad = report["submissions"]
    assert (ada["name"], ada["points"], ada["needs_review"], ada["ignored"]) == ("ada", 20, False, ["notes.txt"])
    assert (bad["points"], bad["needs_review"], len(bad["flags"])) == (0, True, 1)
    assert [test["verdict"] for test in bad["tasks"][0]["tests"]] == ["refused"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_no_cell_of_the_csv_is_a_formula(manifest: Manifest, results: list[SubmissionResult], tmp_path: Path) -> None:
    write_csv(tmp_path / "results.csv", manifest, results)
    rows = list(csv.reader((tmp_path / "results.csv").open(newline="")))
    assert rows[0] == ["name", "total", "task 1", "task 2", "needs_review", "flags"]
    assert rows[1] == ["ada", "20", "10", "10", "no", ""]
    assert len(rows) == 3 and rows[2][1:5] == ["0", "0", "0", "yes"]
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_equal_results_give_equal_bytes(manifest: Manifest, results: list[SubmissionResult], tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_json(tmp_path / f"{name}.json", {}, results)
        write_csv(tmp_path / f"{name}.csv", manifest, results)
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    assert (tmp_path / "first.csv").read_bytes() == (tmp_path / "second.csv").read_bytes()


def test_the_table_shows_names_as_they_are(manifest: Manifest, results: list[SubmissionResult]) -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table(manifest, results))
    for line in remark_lines(results):
        console.print(line)
    text = console.export_text()
    assert "ada" in text and "=cmd()" in text and "[bold]" in text and "20" in text


@pytest.mark.parametrize("count", [2, 8, 13, 14])
def test_the_table_fits_into_eighty_columns(count: int, manifest: Manifest, tmp_path: Path) -> None:
    tasks = [replace(manifest.tasks[0], number=number, points=40) for number in range(1, count + 1)]
    lab = replace(manifest, tasks=tuple(tasks))
    cases = [CaseResult(name, name, Verdict.PASSED) for name in manifest.tasks[0].tests[1:]]
    result = SubmissionResult("a name that is long indeed", "ab" * 32, task_results(lab, cases))
    with (tmp_path / "said").open("w") as file:
        Console(file=file, width=80).print(results_table(lab, [result]))
    *head, row = filter(str.strip, (tmp_path / "said").read_text().splitlines())
    assert row.count("…") == 1 and "…" not in "".join(head), f"only the name may be cut: {head} {row}"
    assert row.split()[-count:] == (["26"] if count > 8 else ["26.7"]) * count


def test_progress_without_a_terminal_is_a_line_for_each_submission(
    results: list[SubmissionResult], tmp_path: Path
) -> None:
    with (tmp_path / "said").open("w") as file, LiveProgress(Console(file=file, width=80), 2) as progress:
        for result in results:
            progress.started(result.name)
            progress.case(result.name)
            progress.idle()
            progress.finished(result)
    lines = (tmp_path / "said").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("[1/2] ada: 20 points") and lines[1] == "[2/2] =cmd(): 0 points"


def test_a_journal_survives_an_interruption_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.write("case", test="test_a", message="ü\n")
        assert read_journal(path) == [{"kind": "case", "test": "test_a", "message": "ü\n"}]
    with Journal(path) as journal:
        journal.write("case", test="test_b")
    assert [record["test"] for record in read_journal(path)] == ["test_a", "test_b"]
    with Journal(path) as journal:
        journal.write("end", failure="half a character: \ud800")
    assert read_journal(path)[-1]["failure"].endswith("\ud800")
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:2])[:-5])
    assert [record["test"] for record in read_journal(path)] == ["test_a"]
