"""results.csv: one row a student, for a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from grader.verdicts import SubmissionResult
from labkit.manifest import Manifest

_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


def write_csv(path: Path, manifest: Manifest, results: Sequence[SubmissionResult]) -> None:
    """Writes name, total, points of each task, whether a person should look, and the remarks.

    Args:
        path: of the file; replaced only when the new one is complete.
        manifest: names the tasks.
        results: in the order of the rows.
    """
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["name", "total", *(f"task {t.number}" for t in manifest.tasks), "needs_review", "flags"])
        for result in results:
            points = [_number(task.points) for task in result.tasks]
            review = "yes" if result.needs_review else "no"
            flags = safe_cell("; ".join(result.flags).replace("\n", " "))
            rows.writerow([safe_cell(result.name), _number(result.points), *points, review, flags])
    temporary.replace(path)


def safe_cell(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(_FORMULA_PREFIXES) else text


def _number(points: float) -> str:
    return f"{points:g}"
