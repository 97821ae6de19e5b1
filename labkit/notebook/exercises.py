"""`check_answer("1", answer, expected, hint=…)`: whether the answer to a notebook's exercise is right."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from labkit.notebook.answer_card import AnswerCard
from labkit.notebook.show import Place

WITHIN = 0.01
"""Relative error of a number that counts as right: who rounds to three digits is right."""
_SLIPS = {
    1e3: "a thousand times", 1e6: "a million times", 1e9: "a billion times", 8.0: "eight times", 2.0: "twice",
    100.0: "a hundred times",
}  # fmt: skip


@dataclass(frozen=True)
class Digest:
    """An exact answer that a notebook does not give away: a word, whole numbers, or several of them.

    Args:
        hex: what `digest_of` made of the exercise's name and the right answer.
    """

    hex: str


def digest_of(name: str, answer: object) -> Digest:
    """The digest to put in place of an exact answer.

    Args:
        name: of the exercise; equal answers to two exercises look different.
        answer: text (its case and outer spaces don't matter), an int, a bool, or a list or set of them.

    Raises:
        ValueError: an answer that two people would not write alike, such as a float.
    """
    return Digest(hashlib.sha256(f"{name}: {_exact(answer)}".encode()).hexdigest()[:16])


def check_answer(
    name: str,
    answer: object,
    expected: object,
    *,
    hint: str,
    within: float = WITHIN,
    cases: Sequence[tuple[Any, ...]] = (),
) -> None:
    """Shows whether an answer is right; a wrong one brings the hint, and None means that it isn't answered yet.

    Args:
        name: of the exercise, as its text gives it.
        answer: what the reader wrote.
        expected: a number, a list of numbers, a `Digest`, or with `cases` a function.
        hint: for who is wrong; it leads on and doesn't give the answer away.
        within: relative error that a number may have.
        cases: arguments at which a function that is asked for must agree with `expected`.

    Raises:
        ValueError: what is expected is none of these; the mistake is the notebook's.
    """
    Place().show(judge(name, answer, expected, hint=hint, within=within, cases=cases))


def judge(
    name: str,
    answer: object,
    expected: object,
    *,
    hint: str,
    within: float = WITHIN,
    cases: Sequence[tuple[Any, ...]] = (),
) -> AnswerCard:
    """As `check_answer`, but returns the card."""
    if callable(expected) != bool(cases):
        raise ValueError(f"exercise {name}: a function is judged at cases, and nothing else is; got {len(cases)} cases")
    numbers = [] if callable(expected) or isinstance(expected, Digest) else _numbers(name, expected)
    if answer is None:
        return AnswerCard(name, answered=False)
    if callable(expected):
        problem = _function_problem(answer, expected, cases, within)
    elif isinstance(expected, Digest):
        problem = _exact_problem(name, answer, expected)
    else:
        problem = _numbers_problem(answer, numbers, within)
    return AnswerCard(name, problem=problem, hint=hint)


def _exact(answer: object) -> str:
    if isinstance(answer, str):
        return repr(answer.strip().casefold())
    if isinstance(answer, int):  # True and 1 are two answers
        return repr(answer)
    if isinstance(answer, Set):
        return "{" + ", ".join(sorted(map(_exact, answer))) + "}"
    if isinstance(answer, list | tuple):
        return "[" + ", ".join(map(_exact, answer)) + "]"
    raise ValueError(f"an exact answer is text, an int, a bool, or a list or set of them; got {answer!r}")


def _exact_problem(name: str, answer: object, expected: Digest) -> str | None:
    try:
        right = digest_of(name, answer) == expected
    except ValueError as error:
        return str(error)
    return None if right else f"{answer!r} is not it"


def _numbers(name: str, expected: object) -> list[float]:
    values = _listed(expected)
    if not values or not all(map(_is_number, values)):
        raise ValueError(f"exercise {name}: expected must be finite numbers, a Digest or a function, got {expected!r}")
    return [float(value) for value in values]


def _numbers_problem(answer: object, expected: list[float], within: float) -> str | None:
    given = _listed(answer)
    if len(given) != len(expected):
        return f"{len(expected)} {'number is' if len(expected) == 1 else 'numbers are'} asked for, got {answer!r}"
    for place, (value, right) in enumerate(zip(given, expected, strict=True), start=1):
        where = f"number {place}, " if len(expected) > 1 else ""
        if not _is_number(value):
            return f"{where}{value!r} is no finite number"
        if not math.isclose(value, right, rel_tol=within):
            return f"{where}{float(value):.4g} is {_how_far(float(value), right, within)}"
    return None


def _listed(value: Any) -> list[Any]:
    """One number or several, of Python, numpy or torch, as a list."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return list(plain) if isinstance(plain, list | tuple) else [plain]


def _how_far(value: float, right: float, within: float) -> str:
    """In which direction, and whether it is a slip of units."""
    for factor, words in _SLIPS.items():
        if math.isclose(value, right * factor, rel_tol=within):
            return f"{words} what is right"
        if math.isclose(value * factor, right, rel_tol=within):
            return f"too small: what is right is {words} as much"
    return "too large" if value > right else "too small"


def _function_problem(
    answer: object, expected: Callable[..., Any], cases: Sequence[tuple[Any, ...]], within: float
) -> str | None:
    if not callable(answer):
        return f"a function is asked for, got {answer!r}"
    for case in cases:
        call = f"answer({', '.join(map(repr, case))})"
        right = expected(*case)
        try:
            given = answer(*case)
        except Exception as error:  # the reader's own code may raise anything
            return f"{call} raised {type(error).__name__}: {error}"
        if problem := _numbers_problem(given, _numbers(call, right), within):
            return f"{call}: {problem}"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
