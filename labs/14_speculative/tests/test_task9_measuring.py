"""Task 9: which drafts were judged, and whether the formula fits what was measured."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from grader.judge.refusal import check_refused
from labkit.drafting import Round

pytestmark = pytest.mark.task(9)


def simulate(alpha: list[float], k: int, count: int, seed: int) -> tuple[Round, ...]:
    """Rounds of k drafts, the one at place i kept with probability alpha[i] if all before it were."""
    generator = random.Random(seed)
    rounds = []
    for _ in range(count):
        kept = 0
        while kept < k and generator.random() < alpha[kept]:
            kept += 1
        rounds.append(Round(k, kept, kept + 1))
    return tuple(rounds)


def close(got: object, right: float) -> bool:
    """Equal up to rounding."""
    return isinstance(got, float) and math.isclose(got, right, rel_tol=1e-9)


ROUNDS = (Round(4, 1, 2), Round(4, 4, 5), Round(4, 0, 1), Round(4, 3, 4), Round(0, 0, 1))
# Kept 8, rejected 3: the second round ended with a bonus.
ENDED = (*ROUNDS, Round(4, 2, 2), Round(3, 3, 3))
# The last two rounds ended on kept drafts: 13 kept, still 3 rejected.


def test_drafts_that_nobody_judged_do_not_count(lab: Any) -> None:
    for rounds, right in ((ROUNDS, 8 / 11), (ENDED, 13 / 16), ((Round(5, 0, 1),), 0.0), ((Round(2, 2, 3),), 1.0)):
        got = lab.acceptance_estimate(rounds)
        assert close(got, right), (
            f"{rounds}: judged are the kept drafts and one rejection a round, unless all were kept or the text ended "
            f"on a kept one; the rate is {right:.4f}, got {got!r}"
        )


def test_the_estimate_finds_the_true_rate(lab: Any) -> None:
    for alpha, k in ((0.3, 2), (0.6, 4), (0.8, 8), (0.9, 1)):
        rounds = simulate([alpha] * k, k, 4000, seed=k)
        got = lab.acceptance_estimate(rounds)
        # Five standard deviations of a share of as many drafts as were judged; false alarms have the rate 6e-7.
        judged = sum(r.accepted + (r.accepted < k) for r in rounds)
        slack = 5 * math.sqrt(alpha * (1 - alpha) / judged)
        assert isinstance(got, float) and abs(got - alpha) < slack, (
            f"rounds of {k} drafts, each kept with probability {alpha}: the estimate is {got!r}, off by more than "
            f"{slack:.4f}; it must not depend on k"
        )


def test_the_rate_of_each_place(lab: Any) -> None:
    got = lab.acceptance_by_place(ENDED, 5)
    # Place 0: kept in 5 rounds, rejected in one. Place 1: kept 4, rejected 1. Place 2: 3 and 0. Place 3: 1 and 1.
    right = [5 / 6, 4 / 5, 1.0, 1 / 2, None]
    fits = isinstance(got, list) and len(got) == 5 and all(
        g is None if r is None else close(g, r) for g, r in zip(got, right, strict=True)
    )  # fmt: skip
    assert fits, f"{ENDED} have the rates {right} at places 0 to 4, got {got}"
    alpha = [0.9, 0.6, 0.3]
    got = lab.acceptance_by_place(simulate(alpha, 3, 6000, seed=1), 3)
    assert all(abs(g - a) < 0.05 for g, a in zip(got, alpha, strict=True)), f"true rates {alpha}, got {got}"


def test_tokens_a_round_are_what_came_out(lab: Any) -> None:
    assert close(lab.tokens_per_round(ROUNDS), 13 / 5), f"13 tokens in 5 rounds, got {lab.tokens_per_round(ROUNDS)!r}"
    got = lab.tokens_per_round(ENDED)
    assert close(got, 18 / 7), f"18 tokens in 7 rounds, those that ended early included, got {got!r}"


def test_the_prediction_fits_what_was_measured(lab: Any) -> None:
    alpha = 8 / 11
    series = sum(alpha**i for i in range(5))
    got = lab.predicted_tokens_per_round(ROUNDS)
    right = (4 * series + 1) / 5
    assert close(got, right), (
        f"{ROUNDS}: alpha {alpha:.3f}, four rounds of 4 drafts and one of none: {right:.4f}, got {got!r}"
    )
    rounds = simulate([0.75] * 6, 6, 4000, seed=3)
    measured, predicted = sum(r.emitted for r in rounds) / 4000, lab.predicted_tokens_per_round(rounds)
    assert abs(predicted / measured - 1) < 0.05, f"measured {measured:.3f} tokens a round, predicted {predicted!r}"


def test_rounds_that_say_nothing_are_refused(lab: Any) -> None:
    assert close(lab.acceptance_estimate((Round(1, 1, 2), Round(1, 0, 1))), 0.5), "a good call: one of two"
    for what, rounds in (("no rounds", ()), ("rounds without drafts", (Round(0, 0, 1),) * 3)):
        check_refused(f"the rate of {what}", lambda given=rounds: lab.acceptance_estimate(given))
        check_refused(f"the prediction of {what}", lambda given=rounds: lab.predicted_tokens_per_round(given))
    check_refused("tokens a round of no rounds", lambda: lab.tokens_per_round(()))
    check_refused("no places", lambda: lab.acceptance_by_place(ROUNDS, 0))
