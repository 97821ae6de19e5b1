"""What the page of one student shows, as plain facts for its template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from grader.reports.test_sources import TestSource
from grader.reports.wording import WORDINGS, Wording, property_in_words
from grader.verdicts import MAX_MESSAGE_CHARACTERS, SubmissionResult, TaskResult, TestResult, Verdict, clean_text
from labkit.manifest import Manifest, Task

MESSAGE_CHARACTERS = 300_000
"""Of all messages on a page together; where there are more, each is cut to its share."""
MAX_FLAGS = 20
MAX_NAMES = 60

_WORKED_ON_LEVEL = 2


@dataclass(frozen=True)
class ShownTest:
    """A test in the table of its task."""

    name: str
    property: str
    wording: Wording
    source: TestSource | None


@dataclass(frozen=True)
class Failure:
    """Tests of a task that came to the same end, with the message that they share."""

    wording: Wording
    message: str
    tests: tuple[ShownTest, ...]


@dataclass(frozen=True)
class Hint:
    """A hint, and how to see the next."""

    level: int
    text: str
    command: str | None


@dataclass(frozen=True)
class ShownTask:
    """A task with its tests, what failed and what helps."""

    task: Task
    points: float
    passed: int
    state: Wording
    tests: tuple[ShownTest, ...]
    failures: tuple[Failure, ...]
    hint: Hint | None


@dataclass(frozen=True)
class StudentPage:
    """Everything on a student's page; whatever comes from the submission is cleaned and of bounded length."""

    name: str
    points: float
    sha256: str
    needs_review: bool
    flags: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    tasks: tuple[ShownTask, ...]


def student_page(manifest: Manifest, sources: Mapping[str, TestSource], result: SubmissionResult) -> StudentPage:
    """Prepares the page of one submission.

    Args:
        manifest: the lab.
        sources: of its tests.
        result: of the submission.
    """
    failing = [test for task in result.tasks for test in task.tests if test.verdict is not Verdict.PASSED]
    limit = MAX_MESSAGE_CHARACTERS
    if sum(min(len(test.message), limit) for test in failing) > MESSAGE_CHARACTERS:
        limit = MESSAGE_CHARACTERS // len(failing)
    flags = [clean_text(flag, 400) for flag in result.flags[:MAX_FLAGS]]
    if len(result.flags) > MAX_FLAGS:
        flags.append(f"and {len(result.flags) - MAX_FLAGS} more remarks, which results.json lists")
    return StudentPage(
        name=clean_text(result.name, 200),
        points=result.points,
        sha256=clean_text(result.sha256, 64),
        needs_review=result.needs_review,
        flags=tuple(flags),
        ignored=tuple(clean_text(name, 200) for name in result.ignored[:MAX_NAMES]),
        notes=tuple(_notes(result)),
        tasks=tuple(_task(manifest, sources, task, limit) for task in result.tasks),
    )


def state_of(task: TaskResult) -> Wording:
    """How a task stands as a whole."""
    if task.passed == len(task.tests):
        return Wording("done", "good", "Every test passed.")
    if task.passed:
        return Wording("in part", "bad", "Some tests passed.")
    verdicts = {test.verdict for test in task.tests}
    if verdicts <= {Verdict.NOT_ATTEMPTED, Verdict.BLOCKED}:
        return WORDINGS[Verdict.NOT_ATTEMPTED]
    if len(verdicts) == 1:
        return WORDINGS[verdicts.pop()]
    return Wording("nothing passed", "bad", "No test passed.")


def _task(manifest: Manifest, sources: Mapping[str, TestSource], result: TaskResult, limit: int) -> ShownTask:
    task = manifest.task(result.number)
    tests = {test.name: _test(test, sources) for test in result.tests}
    grouped: dict[tuple[Verdict, str], list[ShownTest]] = {}
    for test in result.tests:
        if test.verdict is not Verdict.PASSED:
            grouped.setdefault((test.verdict, clean_text(test.message, limit)), []).append(tests[test.name])
    failures = [Failure(WORDINGS[verdict], message, tuple(group)) for (verdict, message), group in grouped.items()]
    return ShownTask(
        task, result.points, result.passed, state_of(result), tuple(tests.values()), tuple(failures),
        _hint(manifest, task, result),
    )  # fmt: skip


def _test(test: TestResult, sources: Mapping[str, TestSource]) -> ShownTest:
    return ShownTest(test.name, property_in_words(test.name), WORDINGS[test.verdict], sources.get(test.name))


def _hint(manifest: Manifest, task: Task, result: TaskResult) -> Hint | None:
    """The first hint for a task that is untouched, the second for one that was worked on; none for one that is done."""
    if result.passed == len(result.tests):
        return None
    untouched = state_of(result) is WORDINGS[Verdict.NOT_ATTEMPTED]
    level = 1 if untouched else min(_WORKED_ON_LEVEL, len(task.hints))
    more = f"make hint LAB={manifest.id} TASK={task.number} LEVEL={level + 1}" if level < len(task.hints) else None
    return Hint(level, task.hints[level - 1], more)


def _notes(result: SubmissionResult) -> list[str]:
    """What a reader should know beside the verdicts: limits that were passed, parts that hold others up."""
    notes = []
    tests = [(task, test) for task in result.tasks for test in task.tests]
    counts = Counter(test.verdict for _, test in tests)
    if late := sum(count for verdict, count in counts.items() if verdict.is_timeout):
        notes.append(f"{_tests(late)} ran out of time.")
    ended = sorted({task.number for task, test in tests if "ended after three time-outs" in test.message})
    if ended:
        notes.append(f"Three time-outs ended {_tasks(ended)}; the tests that were left did not run.")
    if any("used up its" in test.message for _, test in tests if test.verdict.is_timeout):
        notes.append("The processor time for the whole submission was used up; the tests that were left did not run.")
    for verdict, text in (
        (Verdict.MEMORY, "asked for more memory than allowed."),
        (Verdict.OUTPUT_LIMIT, "printed more than allowed."),
        (Verdict.EXITED_EARLY, "ended the process instead of returning."),
        (Verdict.PROTOCOL_FAULT, "sent an answer that breaks the rules of the wire."),
        (Verdict.UNVERIFIED, "could not be run on the machine that graded, and earned nothing yet."),
        (Verdict.INTERNAL_ERROR, "met a fault of the grader's own, and earned nothing yet."),
    ):
        if counts[verdict]:
            notes.append(f"{_tests(counts[verdict])} {text}")
    blocked = sorted({task.number for task, test in tests if test.verdict is Verdict.BLOCKED})
    if blocked:
        notes.append(f"Earlier parts hold up tests of {_tasks(blocked)}; mend those parts first.")
    return notes


def _tests(count: int) -> str:
    return "1 test" if count == 1 else f"{count} tests"


def _tasks(numbers: list[int]) -> str:
    return f"task{'s' if numbers[1:] else ''} {', '.join(map(str, numbers))}"
