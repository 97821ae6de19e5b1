"""The series itself instead of its closed form, and a search that stops nowhere early."""

from __future__ import annotations

import math


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """1 + alpha (1 + alpha (1 + ...)): Horner's rule."""
    _in_range("acceptance", acceptance, 1)
    _whole("num_drafts", num_drafts)
    total = 1.0
    for _ in range(num_drafts):
        total = 1.0 + acceptance * total
    return total


def speedup(acceptance: float, num_drafts: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens by cost."""
    _in_range("draft_cost", draft_cost, math.inf)
    _in_range("verify_cost", verify_cost, math.inf)
    tokens, cost = expected_tokens(acceptance, num_drafts), num_drafts * draft_cost + verify_cost
    if not cost:
        raise ValueError("a round that costs nothing has no speed-up")
    return tokens / cost


def best_num_drafts(acceptance: float, draft_cost: float, most: int = 64) -> int:
    """The first k that none beats."""
    _whole("most", most)
    gains = [speedup(acceptance, k, draft_cost) for k in range(most + 1)]
    return gains.index(max(gains))


def _in_range(name: str, value: float, most: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value < 0 or value > most:
        raise ValueError(f"{name} is out of range: {value!r}")


def _whole(name: str, value: int) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
