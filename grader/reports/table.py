"""The table of results in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from grader.verdicts import SubmissionResult, TaskResult, Verdict
from labkit.manifest import Manifest

_NOTE_CHARACTERS = 60


def results_table(manifest: Manifest, results: Sequence[SubmissionResult]) -> Table:
    """One row a submission: total, points of each task, and what is remarkable.

    Args:
        manifest: the lab.
        results: in the order of the rows.
    """
    table = Table(title=f"lab {manifest.id}: {manifest.title}", title_justify="left")
    table.add_column("submission", overflow="fold")
    table.add_column(f"of {manifest.points:g}", justify="right")
    for task in manifest.tasks:
        table.add_column(f"{task.number} ({task.points:g})", justify="right")
    table.add_column("remarks", overflow="fold")
    for result in results:
        table.add_row(
            # Text, not a string: names are the students' and would be read as markup.
            Text(result.name),
            Text(f"{result.points:g}", style="bold"),
            *(Text(f"{task.points:g}", style=_style(task)) for task in result.tasks),
            Text(_remarks(result), style="yellow" if result.needs_review else "dim"),
        )
    return table


def _style(task: TaskResult) -> str:
    return "green" if task.passed == len(task.tests) else "red" if task.passed == 0 else "yellow"


def _remarks(result: SubmissionResult) -> str:
    if result.flags:
        first = " ".join(result.flags[0].split())
        return first if len(first) <= _NOTE_CHARACTERS else first[: _NOTE_CHARACTERS - 1] + "…"
    counts = Counter(test.verdict for task in result.tasks for test in task.tests)
    del counts[Verdict.PASSED]
    return ", ".join(f"{counts[verdict]} {verdict.value.replace('_', ' ')}" for verdict in Verdict if counts[verdict])
