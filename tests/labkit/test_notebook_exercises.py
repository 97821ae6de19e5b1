"""`check_answer`: what counts as right, what is said to who is wrong, and what a notebook may not ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from labkit.notebook.answer_card import OPEN, RIGHT, WRONG
from labkit.notebook.exercises import check_answer, digest_of, judge


def verdict(answer: object, expected: object, **options: Any) -> str:
    return judge("1", answer, expected, hint="think of bytes", **options).verdict


def problem(answer: object, expected: object, **options: Any) -> str:
    card = judge("1", answer, expected, hint="think of bytes", **options)
    assert card.verdict == WRONG and card.problem is not None
    return card.problem


def test_nothing_written_is_neither_right_nor_wrong() -> None:
    assert verdict(None, 4.8) == OPEN
    assert judge("1", None, 4.8, hint="think of bytes").as_text() == "exercise 1: not answered yet"


@pytest.mark.parametrize("answer", [4.8, 4.78, 4.84, np.float64(4.8), torch.tensor(4.8)])
def test_a_number_is_right_within_the_relative_error_asked_for(answer: object) -> None:
    assert verdict(answer, 4.8) == RIGHT
    assert verdict(4.9, 4.8) == WRONG and verdict(4.9, 4.8, within=0.03) == RIGHT
    assert verdict(0, 0) == RIGHT and verdict(1e-9, 0) == WRONG


@pytest.mark.parametrize(("answer", "told"), [
    (4.8e-3, "a thousand times as much"), (4.8e6, "a million times"), (38.4, "eight times"), (2.4, "twice as much"),
    (5.5, "too large"), (4.0, "too small"), ("4.8", "no finite number"), (float("nan"), "no finite number"),
    (True, "no finite number"), ([4.8, 1.0], "1 number is asked for"),
])  # fmt: skip
def test_a_wrong_number_is_told_in_which_way(answer: object, told: str) -> None:
    assert told in problem(answer, 4.8)


def test_of_several_numbers_each_must_be_right() -> None:
    assert verdict([1, 2.0], (1, 2)) == RIGHT
    assert problem([1, 3], [1, 2]).startswith("number 2, 3 is too large")


@pytest.mark.parametrize(("right", "same", "other"), [
    ("memory", " Memory ", "compute"), (16, 16, 17), ({"b", "a"}, {"a", "b"}, {"a"}), ([1, 2], (1, 2), [2, 1]),
    (True, True, 1),
])  # fmt: skip
def test_an_exact_answer_is_compared_without_being_given_away(right: object, same: object, other: object) -> None:
    expected = digest_of("1", right)
    assert str(right) not in repr(expected)
    assert verdict(same, expected) == RIGHT and verdict(other, expected) == WRONG
    assert expected != digest_of("2", right), "the same answer elsewhere would be recognized"


def test_a_function_must_agree_at_every_case() -> None:
    cases = [(1, 0), (8, 2048)]
    assert verdict(lambda batch, context: 2 * batch + context, lambda b, c: 2 * b + c, cases=cases) == RIGHT
    told = problem(lambda batch, context: 2 * batch, lambda b, c: 2 * b + c, cases=cases)
    assert told.startswith("answer(8, 2048): 16 is too small")
    assert "raised ZeroDivisionError" in problem(lambda b, c: 1 / 0, lambda b, c: 1, cases=cases)
    assert "a function is asked for" in problem(3, lambda b, c: 1, cases=cases)


def test_who_is_wrong_reads_the_hint_and_no_markup_of_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    check_answer("1", "<b>", digest_of("1", "memory"), hint="think of <bytes>")
    assert "hint: think of <bytes>" in capsys.readouterr().out
    shown = judge("1", "<b>", digest_of("1", "memory"), hint="think of <bytes>").as_html()
    assert "&lt;b&gt;" in shown and "&lt;bytes&gt;" in shown
    assert "hint" not in judge("1", 1, 1, hint="think of bytes").as_text()


@pytest.mark.parametrize(("expected", "options"), [
    ("memory", {}), (float("inf"), {}), ([], {}), (lambda: 1, {}), (1.0, {"cases": [(1,)]}),
])  # fmt: skip
def test_an_exercise_that_cannot_be_judged_is_refused_even_unanswered(expected: object, options: Any) -> None:
    with pytest.raises(ValueError, match="exercise 1: "):
        judge("1", None, expected, hint="", **options)
    with pytest.raises(ValueError, match="an exact answer is text"):
        digest_of("1", 0.5)
