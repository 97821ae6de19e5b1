"""From the exception that ended a test to the verdict on the code under test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grader.isolation.proxy import Outcome, WorkerFailed, WorkerNotStarted
from grader.suite import test_seed as seed_of
from grader.suite import verdict_of
from grader.verdicts import Verdict
from labkit.errors import ProtocolFault, StudentError, not_attempted_message


def raised(call: Callable[[], object]) -> BaseException:
    """The exception that a call raises, with its traceback."""
    try:
        call()
    except BaseException as error:
        return error
    raise RuntimeError("it raised nothing")


def throw(error: BaseException, cause: BaseException | None = None) -> Callable[[], object]:
    """A call that raises."""

    def call() -> None:
        raise error from cause

    return call


def from_lab(error: Exception) -> Exception:
    """An exception as the client raises it for the lab's own."""
    error.from_lab = True  # type: ignore[attr-defined]
    error.traceback_text = "cache.py:7: the student's own lines"  # type: ignore[attr-defined]
    return error


STUB = NotImplementedError(not_attempted_message("07", 2, "causal_mask", "Do it."))
CASES: dict[str, tuple[BaseException, Verdict]] = {
    "assertion": (AssertionError("3 is not 4"), Verdict.WRONG_ANSWER),
    "exception of the lab": (from_lab(ValueError("no")), Verdict.EXCEPTION),
    "exception of another type": (StudentError("RuntimeError", "no", "cache.py:7"), Verdict.EXCEPTION),
    "stub": (from_lab(STUB), Verdict.NOT_ATTEMPTED),
    "malformed answer": (ProtocolFault("no frame"), Verdict.PROTOCOL_FAULT),
    "worker not started": (WorkerNotStarted("it said nothing"), Verdict.INTERNAL_ERROR),
    "disk of the grader": (OSError("disk full"), Verdict.INTERNAL_ERROR),
    "memory of the grader": (MemoryError(), Verdict.INTERNAL_ERROR),
    "skip": (pytest.skip.Exception("no model here"), Verdict.UNVERIFIED),
    "cpu": (WorkerFailed(Outcome.CPU_TIMEOUT, "late"), Verdict.TIMEOUT_CPU),
    "wall": (WorkerFailed(Outcome.WALL_TIMEOUT, "late"), Verdict.TIMEOUT_WALL),
    "memory": (WorkerFailed(Outcome.MEMORY, "more"), Verdict.MEMORY),
    "output": (WorkerFailed(Outcome.OUTPUT, "more"), Verdict.OUTPUT_LIMIT),
    "exit": (WorkerFailed(Outcome.EXITED, "gone"), Verdict.EXITED_EARLY),
    "signal": (WorkerFailed(Outcome.KILLED, "gone"), Verdict.EXITED_EARLY),
}


@pytest.mark.parametrize("case", CASES)
def test_each_way_to_fail_has_its_verdict(case: str) -> None:
    error, verdict = CASES[case]
    assert verdict_of(raised(throw(error)))[0] is verdict


def test_every_outcome_of_a_worker_is_a_verdict() -> None:
    for outcome in Outcome:
        assert verdict_of(WorkerFailed(outcome, "why"))[0] not in (Verdict.PASSED, Verdict.INTERNAL_ERROR)


def test_an_assertion_about_a_call_that_never_returned_is_about_that() -> None:
    error = raised(throw(AssertionError("must raise ValueError"), WorkerFailed(Outcome.EXITED, "gone")))
    assert verdict_of(error) == (Verdict.EXITED_EARLY, "gone")


def test_a_student_sees_the_lines_of_the_student() -> None:
    assert verdict_of(raised(throw(from_lab(IndexError("x")))))[1] == "cache.py:7: the student's own lines"


def test_answers_that_a_test_cannot_use_are_wrong_and_not_our_fault() -> None:
    for misuse in (
        lambda: None.shape,  # type: ignore[attr-defined]
        lambda: [1, 2][5],
        lambda: len(3),  # type: ignore[arg-type]
        lambda: torch.ones(3) + torch.ones(4),
        lambda: {}["missing"],
        lambda: next(iter(())),
    ):
        verdict, message = verdict_of(raised(misuse))
        assert verdict is Verdict.WRONG_ANSWER and "kind" in message


def test_seeds_follow_from_seed_lab_and_test() -> None:
    seeds = {seed_of(seed, lab, test) for seed in (0, 1) for lab in ("07", "13") for test in ("test_a", "test_b[1]")}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(0, "07", "test_a") == seed_of(0, "07", "test_a")
