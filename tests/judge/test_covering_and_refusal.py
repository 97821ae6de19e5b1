"""Covering arrays cover, and a refusal is a ValueError with words."""

from __future__ import annotations

from itertools import combinations
from typing import Any, NoReturn

import pytest

from grader.judge.covering import pairwise
from grader.judge.refusal import check_refused


@pytest.mark.parametrize("counts", [(4, 5, 4, 3, 2, 2), (2, 2), (3, 1, 4), (7, 3, 3, 3)])
def test_every_pair_of_values_meets(counts: tuple[int, ...]) -> None:
    factors = {f"factor {i}": list(range(count)) for i, count in enumerate(counts)}
    cases = pairwise(factors)
    for a, b in combinations(factors, 2):
        met = {(case[a], case[b]) for case in cases}
        assert met == {(x, y) for x in factors[a] for y in factors[b]}
    first, second, *_ = sorted(counts, reverse=True)
    assert first * second <= len(cases) <= 1.5 * first * second
    assert cases == pairwise(factors)


@pytest.mark.parametrize("factors", [{}, {"a": [1, 2]}, {"a": [1], "b": []}])
def test_too_little_to_pair_is_refused(factors: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pairwise needs"):
        pairwise(factors)


def raising(error: Exception) -> Any:
    """A call that raises."""

    def call() -> NoReturn:
        raise error

    return call


def test_a_value_error_with_words_is_a_refusal() -> None:
    check_refused("bad", raising(ValueError("row 3 holds NaN")))
    check_refused("bad", raising(ValueError("row 3 holds NaN")), mentions="row 3")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: 7, "returned 7"),
        (raising(ValueError("")), "should mention"),
        (raising(IndexError("out of range")), "IndexError came"),
        (raising(RuntimeError("boom")), "RuntimeError came"),
    ],
)
def test_anything_else_is_none(call: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_refused("bad", call)


def test_a_message_without_the_row_is_none() -> None:
    with pytest.raises(AssertionError, match="should mention 'row 3'"):
        check_refused("bad", raising(ValueError("holds NaN")), mentions="row 3")


def test_a_stub_is_reported_as_a_stub() -> None:
    with pytest.raises(NotImplementedError):
        check_refused("bad", raising(NotImplementedError("not written yet")))
