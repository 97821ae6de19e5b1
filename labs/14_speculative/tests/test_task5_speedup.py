"""Task 5: the arithmetic of the module's section 3.2, every number of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(5)

COSTS = (0.05, 0.1, 0.2)
# The module's table: for each acceptance and draft cost the best k, and the speed-up to two places.
TABLE = {
    0.6: ((4, 1.92), (3, 1.67), (2, 1.40)),
    0.7: ((6, 2.35), (4, 1.98), (3, 1.58)),
    0.8: ((8, 3.09), (6, 2.47), (4, 1.87)),
    0.9: ((13, 4.67), (10, 3.43), (7, 2.37)),
}


def close(got: object, right: float) -> bool:
    """Equal up to the rounding of a few operations."""
    return isinstance(got, float) and math.isclose(got, right, rel_tol=1e-12)


def test_expected_tokens_is_the_sum_of_powers(lab: Any) -> None:
    for alpha in (0.0, 0.25, 0.5, 0.9, 0.999999, 1.0):
        for k in (0, 1, 2, 7, 30):
            got, right = lab.expected_tokens(alpha, k), math.fsum(alpha**i for i in range(k + 1))
            # Near 1 the closed form loses digits to 1 - alpha.
            fits = isinstance(got, float) and math.isclose(got, right, rel_tol=1e-8)
            assert fits, f"alpha {alpha}, k {k}: 1 + alpha + ... + alpha^k is {right}, got {got!r}"


def test_the_worked_example(lab: Any) -> None:
    tokens, gain = lab.expected_tokens(0.8, 4), lab.speedup(0.8, 4, 0.05)
    assert close(tokens, 3.3616), f"alpha 0.8 and k 4 give 3.3616 tokens a round, got {tokens!r}"
    assert close(gain, 3.3616 / 1.2), f"at c = 0.05 that is 3.3616 / 1.2 = 2.80 times faster, got {gain!r}"


def test_the_table_of_twelve(lab: Any) -> None:
    for alpha, cells in TABLE.items():
        for cost, (k, gain) in zip(COSTS, cells, strict=True):
            best = lab.best_num_drafts(alpha, cost)
            assert best == k, f"alpha {alpha}, c {cost}: the best k is {k}, got {best!r}"
            got = lab.speedup(alpha, k, cost)
            assert isinstance(got, float) and abs(got - gain) <= 0.005 + 1e-9, (
                f"alpha {alpha}, c {cost}, k {k}: the module's table says {gain}, got {got!r}"
            )


def test_a_dear_verification_eats_the_gain(lab: Any) -> None:
    for verify_cost in (0.5, 1.0, 1.8, 4.0):
        got = lab.speedup(0.7, 3, 0.1, verify_cost)
        right = (1 + 0.7 + 0.49 + 0.343) / (0.3 + verify_cost)
        assert close(got, right), f"verification at {verify_cost} steps: {right:.4f}, got {got!r}"
    got = lab.speedup(0.5, 0, 0.3)
    assert close(got, 1.0), f"without drafts nothing changes: the speed-up is 1, got {got!r}"


def test_no_speculation_where_it_does_not_pay(lab: Any) -> None:
    assert lab.best_num_drafts(0.8, 0.05) == 8, "a case where it pays: alpha 0.8, c 0.05, k 8"
    for alpha, cost in ((0.1, 0.2), (0.0, 0.05), (0.5, 1.0), (0.3, 0.3)):
        best = lab.best_num_drafts(alpha, cost)
        assert best == 0, f"alpha {alpha}, c {cost}: any draft costs more than it brings, so k is 0, got {best!r}"
    assert lab.best_num_drafts(0.9, 0.05, 5) == 5, "the best k of at most 5 is 5 where 13 would be best"
    assert lab.best_num_drafts(1.0, 0.0, 9) == 9, "free drafts that are always right: as many as allowed"
    assert lab.best_num_drafts(0.0, 0.0, 9) == 0, "of equally good numbers the smallest: free drafts, never right"


def test_impossible_rates_and_costs_are_refused(lab: Any) -> None:
    assert close(lab.speedup(0.5, 1, 0.5), 1.0), "a good call: 1.5 tokens at the price of 1.5 steps"
    for alpha in (-0.1, 1.01, math.nan, math.inf):
        check_refused(f"acceptance {alpha}", lambda a=alpha: lab.expected_tokens(a, 3))
        check_refused(f"acceptance {alpha}", lambda a=alpha: lab.best_num_drafts(a, 0.1))
    check_refused("k of -1", lambda: lab.expected_tokens(0.5, -1))
    check_refused("k of 1.5", lambda: lab.speedup(0.5, 1.5, 0.1))
    check_refused("a negative draft cost", lambda: lab.speedup(0.5, 2, -0.1))
    check_refused("a verification that costs less than nothing", lambda: lab.speedup(0.5, 2, 0.1, -1.0))
    check_refused("a round for nothing", lambda: lab.speedup(0.5, 2, 0.0, 0.0))
    check_refused("at most -1 drafts", lambda: lab.best_num_drafts(0.5, 0.1, -1))
