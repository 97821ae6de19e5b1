"""Tests of samplers against probabilities known exactly, with the false-alarm rate computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_EXPECTED = 5.0


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test of counts against probabilities.

    Args:
        statistic: sum of (count − expected)² / expected over the bins.
        degrees: bins − 1.
        p_value: probability that right samples give a statistic at least this large: failing a result when
            it lies below alpha raises a false alarm with probability alpha.
        impossible: a token of probability 0 that was drawn, or None; such a draw is wrong whatever the counts.
    """

    statistic: float
    degrees: int
    p_value: float
    impossible: int | None = None


def chi_square(tokens: Sequence[int] | Tensor, probs: Sequence[float] | Tensor) -> ChiSquare:
    """Test whether tokens were drawn from a distribution.

    Tokens that are expected fewer than five times share one bin, since the chi-square law holds for full bins.

    Args:
        tokens: the draws, ids into `probs`.
        probs: the distribution, summing to 1.

    Raises:
        ValueError: no draws, an id outside the distribution, or one that does not sum to 1.
    """
    p = torch.as_tensor(probs, dtype=torch.float64)
    drawn = torch.as_tensor(tokens, dtype=torch.int64)
    if drawn.numel() == 0 or abs(float(p.sum()) - 1.0) > 1e-9:
        raise ValueError(f"got {drawn.numel()} draws and probabilities with sum {float(p.sum())}")
    if not 0 <= int(drawn.min()) <= int(drawn.max()) < p.numel():
        raise ValueError(f"draws must be ids from 0 to {p.numel() - 1}, got {int(drawn.min())} to {int(drawn.max())}")
    counts = torch.bincount(drawn, minlength=p.numel()).double()
    forbidden = (counts > 0) & (p == 0)
    if bool(forbidden.any()):
        return ChiSquare(float("inf"), 0, 0.0, impossible=int(forbidden.int().argmax()))
    expected = p * drawn.numel()
    full = expected >= LEAST_EXPECTED
    bins = [(counts[full], expected[full])]
    if bool((expected[~full] > 0).any()):
        bins.append((counts[~full].sum().unsqueeze(0), expected[~full].sum().unsqueeze(0)))
    observed, wanted = (torch.cat(parts) for parts in zip(*bins, strict=True))
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    degrees = observed.numel() - 1
    return ChiSquare(statistic, degrees, chi_square_tail(statistic, degrees))


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(X ≥ statistic) for a chi-square variable: the regularized upper incomplete gamma function."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def total_variation(p: Sequence[float] | Tensor, q: Sequence[float] | Tensor) -> float:
    """Half the sum of |p − q|: the largest difference in probability that p and q give to one event."""
    return 0.5 * float((torch.as_tensor(p, dtype=torch.float64) - torch.as_tensor(q, dtype=torch.float64)).abs().sum())
