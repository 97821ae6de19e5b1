"""results.json: everything about a grading run, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grader.verdicts import SubmissionResult, TaskResult

SCHEMA_VERSION = 1


def write_json(path: Path, facts: Mapping[str, Any], results: Sequence[SubmissionResult]) -> None:
    """Writes the report; an older one is replaced only when the new one is complete.

    Args:
        path: of the file.
        facts: about the run, from `run_facts`.
        results: in the order of the report.
    """
    report = {"schema_version": SCHEMA_VERSION, **facts, "submissions": [_submission(result) for result in results]}
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _submission(result: SubmissionResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "sha256": result.sha256,
        "points": result.points,
        **({"penalty_percent": result.penalty_percent} if result.penalty_percent else {}),
        "needs_review": result.needs_review,
        "flags": list(result.flags),
        "ignored": list(result.ignored),
        "tasks": [_task(task) for task in result.tasks],
    }


def _task(task: TaskResult) -> dict[str, Any]:
    return {
        "number": task.number,
        "title": task.title,
        "points": task.points,
        "max_points": task.max_points,
        "tests": [
            {"name": test.name, "verdict": test.verdict.value, "message": test.message} for test in task.tests
        ],
    }
