"""The table of results in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from grader.verdicts import SubmissionResult, TaskResult, Verdict
from labkit.manifest import Manifest

_NOTE_CHARACTERS = 100
_TASKS_WITH_DECIMALS = 8


def results_table(manifest: Manifest, results: Sequence[SubmissionResult]) -> Table:
    """One row a submission: its total and the points of each task.

    Args:
        manifest: the lab.
        results: in the order of the rows.
    """
    # Fits into 80 columns with eight tasks, and with up to fourteen where their points are shown as whole numbers.
    many = len(manifest.tasks) > _TASKS_WITH_DECIMALS
    title, padding = f"lab {manifest.id}: {manifest.title}", (0, 0 if many else 1, 0, 0)
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=padding)
    longest = max(10, *(len(result.name) for result in results))
    table.add_column("submission", no_wrap=True, width=min(13 if many else 20, longest))
    table.add_column(f"of\n{manifest.points:g}", justify="right", no_wrap=True, width=6)
    for task in manifest.tasks:
        table.add_column(f"t{task.number}\n{task.points:g}", justify="right", no_wrap=True, width=3 if many else 4)
    for result in results:
        table.add_row(
            # Text, not a string: names are the students' and would be read as markup.
            Text(result.name),
            Text(f"{result.points:g}", style="bold"),
            # Rounded down, so that only what is complete looks complete.
            *(Text(f"{int(task.points) if many else task.points:.3g}", style=_style(task)) for task in result.tasks),
        )
    return table


def remark_lines(results: Sequence[SubmissionResult]) -> list[Text]:
    """A line for each submission that is remarkable: its first flag, or how often each verdict but "passed" came."""
    return [
        Text(f"{result.name}: {remarks}", style="yellow" if result.needs_review else "")
        for result in results
        if (remarks := _remarks(result))
    ]


def _style(task: TaskResult) -> str:
    return "green" if task.passed == len(task.tests) else "red" if task.passed == 0 else "yellow"


def _remarks(result: SubmissionResult) -> str:
    if result.flags:
        first = " ".join(result.flags[0].split())
        return first if len(first) <= _NOTE_CHARACTERS else first[: _NOTE_CHARACTERS - 1] + "…"
    counts = Counter(test.verdict for task in result.tasks for test in task.tests)
    del counts[Verdict.PASSED]
    return ", ".join(f"{counts[verdict]} {verdict.value.replace('_', ' ')}" for verdict in Verdict if counts[verdict])
