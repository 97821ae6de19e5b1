"""What the grader concludes about a test, a task and a submission, and how conclusions are combined."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from labkit.manifest import Manifest, Task

MAX_MESSAGE_CHARACTERS = 2_000


class Verdict(Enum):
    """The outcome of a test, in a fixed order: of several cases the one that stands last counts."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    EXCEPTION = "exception"
    TIMEOUT_CPU = "timeout_cpu"
    TIMEOUT_WALL = "timeout_wall"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    EXITED_EARLY = "exited_early"
    PROTOCOL_FAULT = "protocol_fault"
    BANNED_CALL = "banned_call"
    NOT_ATTEMPTED = "not_attempted"
    BLOCKED = "blocked"
    REFUSED = "refused"
    UNVERIFIED = "unverified"
    INTERNAL_ERROR = "internal_error"

    @property
    def severity(self) -> int:
        """Its place in the order."""
        return list(Verdict).index(self)

    @property
    def is_timeout(self) -> bool:
        """Whether it counts towards the time-outs that end a task."""
        return self in (Verdict.TIMEOUT_CPU, Verdict.TIMEOUT_WALL)


NEEDS_REVIEW = frozenset(
    {Verdict.BANNED_CALL, Verdict.PROTOCOL_FAULT, Verdict.REFUSED, Verdict.UNVERIFIED, Verdict.INTERNAL_ERROR}
)
"""Verdicts that a person should look at: what the grader could not decide, and what looks like an attempt on it."""

MAY_BE_BLOCKED = frozenset(set(Verdict) - NEEDS_REVIEW - {Verdict.PASSED})


@dataclass(frozen=True)
class CaseResult:
    """One case of a test function.

    Args:
        test: name of the test function.
        case: pytest's name of the case, e.g. "test_x[2-float16]".
        verdict: its outcome.
        message: why, for the student.
        integration: whether the test also uses the code of the tasks that its own task requires.
    """

    test: str
    case: str
    verdict: Verdict
    message: str = ""
    integration: bool = False


@dataclass(frozen=True)
class TestResult:
    """One test function: passed only if it has cases and all of them passed."""

    __test__ = False  # not a class of tests, whatever pytest makes of its name

    name: str
    verdict: Verdict
    message: str = ""
    integration: bool = False


@dataclass(frozen=True)
class TaskResult:
    """One task: its tests earn equal shares of its points."""

    number: int
    title: str
    max_points: float
    tests: tuple[TestResult, ...]

    @property
    def passed(self) -> int:
        """Number of tests that passed."""
        return sum(test.verdict is Verdict.PASSED for test in self.tests)

    @property
    def points(self) -> float:
        """Points earned, to two decimals."""
        return round(self.max_points * self.passed / len(self.tests), 2)


@dataclass(frozen=True)
class SubmissionResult:
    """Everything that the reports say about one submission.

    Args:
        name: the student's, taken from the submission's file name.
        sha256: hash of the files that were graded, empty if none was.
        tasks: in the manifest's order.
        ignored: names that were handed in but not looked at.
        flags: remarks for a person, e.g. where a banned name stands.
        penalty_percent: of the points earned, taken off for lateness.
    """

    name: str
    sha256: str
    tasks: tuple[TaskResult, ...]
    ignored: tuple[str, ...] = ()
    flags: tuple[str, ...] = field(default=())
    penalty_percent: float = 0.0

    @property
    def points(self) -> float:
        """Points earned in all tasks, less what lateness costs."""
        return round(sum(task.points for task in self.tasks) * (1 - self.penalty_percent / 100), 2)

    @property
    def needs_review(self) -> bool:
        """Whether a person should look at it: something is odd, or nothing could be graded at all."""
        return not self.sha256 or any(test.verdict in NEEDS_REVIEW for task in self.tasks for test in task.tests)


def clean_text(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Makes text that a submission may have shaped safe to store and show, and the same in every run.

    Control and format characters (terminal commands, bidirectional overrides, lone surrogates) are dropped, save
    newlines and tabs; addresses of objects are hidden; what is too long is cut.
    """
    text = text[: 4 * limit]  # bounds the work below
    kept = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co"))
    kept = re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x…", kept).strip()
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def combine(task: Task, name: str, cases: Iterable[CaseResult]) -> TestResult:
    """The result of a test function from those of its cases.

    Args:
        task: the task whose test it is; named where no case ran.
        name: the function, as the manifest lists it.
        cases: its cases; none means that the suite never ran it, which is the grader's fault.
    """
    cases = list(cases)
    if not cases:
        text = f"the suite did not run this test of task {task.number}"
        return TestResult(name, Verdict.INTERNAL_ERROR, text)
    worst = max(cases, key=lambda case: case.verdict.severity)
    message = worst.message
    if worst.verdict is not Verdict.PASSED and worst.case != name:
        message = f"{worst.case}: {message}"
    return TestResult(name, worst.verdict, clean_text(message), any(case.integration for case in cases))


def task_results(manifest: Manifest, cases: Iterable[CaseResult]) -> tuple[TaskResult, ...]:
    """Results of all tasks; the manifest alone says which tests there are.

    An integration test that fails while a task that it builds on has failed reads "blocked by task n".
    """
    by_test: dict[str, list[CaseResult]] = {}
    for case in cases:
        by_test.setdefault(case.test, []).append(case)
    results: list[TaskResult] = []
    failed: set[int] = set()
    for task in manifest.tasks:
        tests = [combine(task, name, by_test.get(name, ())) for name in task.tests]
        blocker = next((number for number in task.requires if number in failed), None)
        if blocker is not None:
            tests = [_blocked(test, manifest, task, blocker) for test in tests]
        result = TaskResult(task.number, task.title, task.points, tuple(tests))
        if result.passed < len(tests):
            failed.add(task.number)
        results.append(result)
    return tuple(results)


def same_for_all(manifest: Manifest, verdict: Verdict, message: str) -> tuple[TaskResult, ...]:
    """Results of a submission that no test was run on."""
    return tuple(
        TaskResult(
            task.number,
            task.title,
            task.points,
            tuple(TestResult(name, verdict, clean_text(message)) for name in task.tests),
        )
        for task in manifest.tasks
    )


def _blocked(test: TestResult, manifest: Manifest, task: Task, blocker: int) -> TestResult:
    if not test.integration or test.verdict not in MAY_BE_BLOCKED:
        return test
    own_stub = f"lab {manifest.id} task {task.number}:" in test.message
    if test.verdict is Verdict.NOT_ATTEMPTED and own_stub:
        return test
    text = f"blocked by task {blocker}: this test also uses its code.\n{test.message}"
    return replace(test, verdict=Verdict.BLOCKED, message=clean_text(text))
