"""How cases become tests, tests become tasks, and what text from a submission may look like in a report."""

from __future__ import annotations

import pytest

from grader.verdicts import (
    NEEDS_REVIEW,
    CaseResult,
    SubmissionResult,
    TaskResult,
    Verdict,
    clean_text,
    same_for_all,
    task_results,
)
from labkit.errors import not_attempted_message
from labkit.manifest import Manifest


def results(manifest: Manifest, *cases: CaseResult) -> dict[str, tuple[Verdict, str]]:
    """Verdict and message of each test; tests that are not given have passed."""
    given = {case.test for case in cases}
    rest = [CaseResult(t, t, Verdict.PASSED) for task in manifest.tasks for t in task.tests if t not in given]
    tasks = task_results(manifest, [*cases, *rest])
    return {test.name: (test.verdict, test.message) for task in tasks for test in task.tests}


def points(tasks: tuple[TaskResult, ...]) -> list[float]:
    """Points of each task."""
    return [task.points for task in tasks]


def test_equal_shares_for_equal_tests(manifest: Manifest) -> None:
    cases = [CaseResult(name, name, Verdict.PASSED) for name in ("test_a", "test_b", "test_d", "test_joined")]
    tasks = task_results(manifest, [*cases, CaseResult("test_c", "test_c", Verdict.WRONG_ANSWER, "no")])
    assert points(tasks) == [6.67, 10]
    assert SubmissionResult("ada", "", tasks).points == 16.67


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.PASSED])
def test_one_case_that_did_not_pass_fails_its_test(manifest: Manifest, verdict: Verdict) -> None:
    cases = [CaseResult("test_a", f"test_a[{n}]", Verdict.PASSED) for n in range(3)]
    cases.insert(1, CaseResult("test_a", "test_a[x]", verdict, "why"))
    assert results(manifest, *cases)["test_a"] == (verdict, "test_a[x]: why")


def test_a_test_that_never_ran_is_the_graders_fault_and_earns_nothing(manifest: Manifest) -> None:
    tasks = task_results(manifest, [])
    assert {test.verdict for task in tasks for test in task.tests} == {Verdict.INTERNAL_ERROR}
    assert points(tasks) == [0, 0]
    assert SubmissionResult("ada", "", tasks).needs_review


def test_tests_that_the_manifest_does_not_list_earn_nothing(manifest: Manifest) -> None:
    cases = [CaseResult(f"test_extra{n}", "x", Verdict.PASSED) for n in range(50)]
    assert points(task_results(manifest, cases)) == [0, 0]


def test_an_integration_test_that_fails_through_an_earlier_task_is_blocked(manifest: Manifest) -> None:
    early = CaseResult("test_b", "test_b", Verdict.WRONG_ANSWER, "no")
    late = CaseResult("test_joined", "test_joined", Verdict.EXCEPTION, "IndexError", integration=True)
    verdict, message = results(manifest, early, late)["test_joined"]
    assert verdict is Verdict.BLOCKED and "task 1" in message and "IndexError" in message


def test_only_integration_tests_are_blocked(manifest: Manifest) -> None:
    early = CaseResult("test_b", "test_b", Verdict.WRONG_ANSWER, "no")
    late = CaseResult("test_d", "test_d", Verdict.WRONG_ANSWER, "no either")
    assert results(manifest, early, late)["test_d"][0] is Verdict.WRONG_ANSWER


def test_a_failure_of_its_own_is_not_blamed_on_an_earlier_task(manifest: Manifest) -> None:
    late = CaseResult("test_joined", "test_joined", Verdict.WRONG_ANSWER, "no", integration=True)
    assert results(manifest, late)["test_joined"][0] is Verdict.WRONG_ANSWER
    early = CaseResult("test_b", "test_b", Verdict.WRONG_ANSWER, "no")
    stub = not_attempted_message("98", 2, "g", "Do it.")
    late = CaseResult("test_joined", "test_joined", Verdict.NOT_ATTEMPTED, stub, integration=True)
    assert results(manifest, early, late)["test_joined"][0] is Verdict.NOT_ATTEMPTED


def test_what_a_person_must_see_is_not_hidden_as_blocked(manifest: Manifest) -> None:
    early = CaseResult("test_b", "test_b", Verdict.WRONG_ANSWER, "no")
    for verdict in sorted(NEEDS_REVIEW, key=lambda each: each.severity):
        late = CaseResult("test_joined", "test_joined", verdict, "", integration=True)
        assert results(manifest, early, late)["test_joined"][0] is verdict


def test_a_passed_integration_test_stays_passed(manifest: Manifest) -> None:
    early = CaseResult("test_b", "test_b", Verdict.WRONG_ANSWER, "no")
    late = CaseResult("test_joined", "test_joined", Verdict.PASSED, "", integration=True)
    assert results(manifest, early, late)["test_joined"][0] is Verdict.PASSED


def test_verdicts_that_need_a_person_flag_the_submission(manifest: Manifest) -> None:
    for verdict in Verdict:
        tasks = same_for_all(manifest, verdict, "why")
        assert SubmissionResult("ada", "ab" * 32, tasks).needs_review == (verdict in NEEDS_REVIEW)
    assert SubmissionResult("ada", "", same_for_all(manifest, Verdict.NOT_ATTEMPTED, "nothing came")).needs_review


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[31mred\x07", "[31mred"),
        ("right\u202eleft", "rightleft"),
        ("\ud800surrogate", "surrogate"),
        ("<Tensor at 0x7f4f9ca0ae80>", "<Tensor at 0x…>"),
        ("x" * 5000, "x" * 1999 + "…"),
        ("", ""),
    ],
)
def test_text_of_a_submission_is_made_safe_to_show(text: str, clean: str) -> None:
    assert clean_text(text) == clean
