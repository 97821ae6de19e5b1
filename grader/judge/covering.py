"""Pairwise covering arrays: few test cases that still try every pair of values together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases such that any two values of any two factors meet in at least one of them.

    Greedy and deterministic: each case starts from a pair not met yet and takes, factor by factor, the value that
    meets most of the others. A full product would have as many cases as the product of all counts.

    Args:
        factors: the values of each factor, by name; at least two factors.

    Returns:
        One dict of name and value a case.

    Raises:
        ValueError: fewer than two factors, or one without values.
    """
    names = list(factors)
    if len(names) < 2 or any(len(factors[name]) == 0 for name in names):
        raise ValueError(f"pairwise needs at least two factors with values each, got {dict(factors)}")
    open_pairs = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    cases = []
    while open_pairs:
        chosen = dict(min(open_pairs))
        for factor in range(len(names)):
            if factor not in chosen:
                counts = [
                    sum(_pair(factor, value, other, chosen[other]) in open_pairs for other in chosen)
                    for value in range(len(factors[names[factor]]))
                ]
                chosen[factor] = counts.index(max(counts))
        open_pairs -= {_pair(a, chosen[a], b, chosen[b]) for a, b in combinations(sorted(chosen), 2)}
        cases.append({names[factor]: factors[names[factor]][chosen[factor]] for factor in range(len(names))})
    return cases


def _pair(a: int, i: int, b: int, j: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The pair in the order of its factors."""
    return ((a, i), (b, j)) if a < b else ((b, j), (a, i))
