"""Task 5: what speculation is worth, before anybody builds it."""

from __future__ import annotations

import math

from labkit.checks import check_count


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens that a round emits on average, if each draft is kept with the same chance, whatever came before.

    Args:
        acceptance: alpha, from 0 to 1.
        num_drafts: k, at least 0.

    Returns:
        1 + alpha + ... + alpha^k: the target's own token, and each draft that all before it let live.

    Raises:
        ValueError: `acceptance` outside 0 to 1, or `num_drafts` no int of at least 0.

    Source: module section 3.2.
    """
    _check("acceptance", acceptance, 1.0)
    check_count("num_drafts", num_drafts, 0)
    # BEGIN SOLUTION
    if acceptance == 1:
        return num_drafts + 1.0
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
    # END SOLUTION


def speedup(acceptance: float, num_drafts: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """How many times faster than plain decoding, in time per token.

    Args:
        acceptance: alpha, from 0 to 1.
        num_drafts: k, at least 0.
        draft_cost: c, one draft step in units of one decode step of the target.
        verify_cost: v(k), the pass over k + 1 tokens in the same units: 1 as long as the target is memory-bound.

    Returns:
        expected tokens / (k c + v); below 1 speculation costs more than it brings.

    Raises:
        ValueError: `acceptance` outside 0 to 1, a negative cost, or a round that costs nothing.
    """
    _check("acceptance", acceptance, 1.0)
    _check("draft_cost", draft_cost)
    _check("verify_cost", verify_cost)
    check_count("num_drafts", num_drafts, 0)
    if num_drafts * draft_cost + verify_cost == 0:
        raise ValueError("a round must cost something; give a verify_cost above 0")
    # BEGIN SOLUTION
    return expected_tokens(acceptance, num_drafts) / (num_drafts * draft_cost + verify_cost)
    # END SOLUTION


def best_num_drafts(acceptance: float, draft_cost: float, most: int = 64) -> int:
    """The k with the largest speed-up, if verifying costs one step whatever k is.

    Args:
        acceptance: alpha, from 0 to 1.
        draft_cost: c, as in `speedup`.
        most: the largest k to look at, at least 0.

    Returns:
        From 0, which is no speculation, to `most`; of equally good ones the smallest.

    Raises:
        ValueError: as `speedup`, or `most` is no int of at least 0.
    """
    check_count("most", most, 0)
    _check("acceptance", acceptance, 1.0)
    _check("draft_cost", draft_cost)
    # BEGIN SOLUTION
    return max(range(most + 1), key=lambda k: (speedup(acceptance, k, draft_cost), -k))
    # END SOLUTION


def _check(name: str, value: float, most: float = math.inf) -> None:
    """Refuse what is no finite number from 0 to `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not 0 <= value <= most:
        limit = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
        raise ValueError(f"{name} must be a number {limit}, got {value!r}")
