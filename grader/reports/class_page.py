"""What the page of the whole class shows, as plain facts for its template."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grader.reports.student_page import state_of
from grader.reports.wording import Wording, property_in_words
from grader.verdicts import SubmissionResult, Verdict, clean_text
from labkit.manifest import Manifest, Task

NAME_CHARACTERS = 60
REASON_CHARACTERS = 160
MAX_TESTS = 20

_BINS = (0.2, 0.4, 0.6, 0.8)
BIN_LABELS = ("0", "to 20", "to 40", "to 60", "to 80", "below 100", "100")
"""In percent of a task's points; nothing and everything have bars of their own."""

_PASSED_BY = frozenset({Verdict.NOT_ATTEMPTED, Verdict.BLOCKED, Verdict.REFUSED})
"""Verdicts that tell nothing about how hard a test is."""


@dataclass(frozen=True)
class Row:
    """A submission in the table."""

    name: str
    page: str
    points: float
    tasks: tuple[tuple[float, Wording], ...]
    needs_review: bool
    reason: str


@dataclass(frozen=True)
class Bar:
    """How many submissions earned a share of a task's points; `height` is in percent of the tallest bar."""

    label: str
    count: int
    height: float


@dataclass(frozen=True)
class Distribution:
    """Scores of a task."""

    task: Task
    bars: tuple[Bar, ...]
    mean: float

    @property
    def in_words(self) -> str:
        """The same for those who cannot see the bars."""
        return ", ".join(f"{bar.count} at {bar.label} %" for bar in self.bars if bar.count)


@dataclass(frozen=True)
class HardTest:
    """A test that many submissions fail."""

    name: str
    property: str
    task: int
    failed: int
    not_attempted: int


@dataclass(frozen=True)
class Order:
    """A way to sort the table: every one is a page, so that no script is needed."""

    key: str
    page: str
    label: str
    direction: str


@dataclass(frozen=True)
class ClassPage:
    """Everything on the pages of the class."""

    rows: tuple[Row, ...]
    orders: tuple[Order, ...]
    distributions: tuple[Distribution, ...]
    hard_tests: tuple[HardTest, ...]
    median: float
    complete: int

    @property
    def review(self) -> tuple[Row, ...]:
        """Submissions that need a person."""
        return tuple(row for row in self.rows if row.needs_review)

    def sorted_by(self, order: Order) -> list[Row]:
        """The rows of one page; points from the best down, equals by name."""
        if order.key == "name":
            return list(self.rows)
        value: Callable[[Row], float] = lambda row: row.points  # noqa: E731
        if order.key != "total":
            place = int(order.key)
            value = lambda row: row.tasks[place][0]  # noqa: E731
        return sorted(self.rows, key=value, reverse=True)


def class_page(manifest: Manifest, results: Sequence[SubmissionResult], pages: Mapping[str, str]) -> ClassPage:
    """Prepares the pages of the class.

    Args:
        manifest: the lab.
        results: of all submissions, at least one.
        pages: the file name of each submission's page.
    """
    by_name = sorted(results, key=lambda result: (result.name.casefold(), result.name))
    points = [result.points for result in results]
    return ClassPage(
        rows=tuple(_row(result, pages) for result in by_name),
        orders=tuple(_orders(manifest)),
        distributions=tuple(_distribution(task, place, results) for place, task in enumerate(manifest.tasks)),
        hard_tests=tuple(_hard_tests(manifest, results)),
        median=statistics.median(points),
        complete=sum(each >= manifest.points for each in points),
    )


def _row(result: SubmissionResult, pages: Mapping[str, str]) -> Row:
    return Row(
        name=clean_text(result.name, NAME_CHARACTERS),
        page=pages[result.name],
        points=result.points,
        tasks=tuple((task.points, state_of(task)) for task in result.tasks),
        needs_review=result.needs_review,
        reason=clean_text(" ".join(result.flags[0].split()), REASON_CHARACTERS) if result.flags else "",
    )


def _orders(manifest: Manifest) -> list[Order]:
    return [
        Order("name", "index.html", "Name", "ascending"),
        Order("total", "by-total.html", "Total", "descending"),
        *(
            Order(str(place), f"by-task-{task.number}.html", f"Task {task.number}", "descending")
            for place, task in enumerate(manifest.tasks)
        ),
    ]


def _distribution(task: Task, place: int, results: Sequence[SubmissionResult]) -> Distribution:
    points = [result.tasks[place].points for result in results]
    counts = [0] * len(BIN_LABELS)
    for each in points:
        share = each / task.points
        counts[0 if share <= 0 else len(counts) - 1 if share >= 1 else 1 + sum(share > edge for edge in _BINS)] += 1
    bars = [Bar(label, count, 100 * count / max(counts)) for label, count in zip(BIN_LABELS, counts, strict=True)]
    return Distribution(task, tuple(bars), statistics.fmean(points))


def _hard_tests(manifest: Manifest, results: Sequence[SubmissionResult]) -> list[HardTest]:
    """Tests that code failed, those that most of it failed first."""
    found = []
    for place, task in enumerate(manifest.tasks):
        for test, name in enumerate(task.tests):
            verdicts = [result.tasks[place].tests[test].verdict for result in results]
            failed = sum(verdict is not Verdict.PASSED and verdict not in _PASSED_BY for verdict in verdicts)
            unjudged = sum(verdict in _PASSED_BY for verdict in verdicts)
            if failed:
                found.append(HardTest(name, property_in_words(name), task.number, failed, unjudged))
    return sorted(found, key=lambda test: -test.failed)[:MAX_TESTS]
