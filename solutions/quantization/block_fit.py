"""Task 13: scales that make a block's weighted error small, by least squares from a few starting points."""

from __future__ import annotations

# BEGIN SOLUTION
from itertools import product

# END SOLUTION
import torch
from torch import Tensor

# BEGIN SOLUTION
# Where the ends of the range are put at the start, as shares of the block's own: a little less than all of it
# gives the many values in the middle finer steps.
_REACHES = (1.02, 0.94, 0.86)
_ROUNDS = 2
# END SOLUTION


def nearest_codes(values: Tensor, scale: Tensor, minimum: Tensor | float, low: int, high: int) -> Tensor:
    """The codes whose scale · code − minimum lies nearest to each value; given.

    Args:
        values: `[..., n]`.
        scale: `[..., 1]`, of any sign; where it is 0, all codes mean the same.
        minimum: `[..., 1]` or a number.
        low: the smallest code.
        high: the largest.

    Returns:
        Whole numbers as floats, of the shape of `values`.
    """
    return ((values + minimum) / torch.where(scale == 0, 1, scale)).round().clamp(low, high)


def weighted_error(values: Tensor, approximation: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · (approximation − value)² over the last dimension, `[..., 1]`; given."""
    return (weights * (approximation - values).square()).sum(-1, keepdim=True)


def least_squares(values: Tensor, weights: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum ≥ 0 with the least Σ weight · (scale · code − minimum − value)² for codes as they are.

    Args:
        values: `[..., n]` float32 or float64; each row of n is a block.
        weights: above 0, of a shape that broadcasts to that of `values`.
        codes: whole numbers of at least 0 as floats, of the shape of `values`.

    Returns:
        Scale and minimum, `[..., 1]` each. Where the best numbers without a bound are negative, the best on the border
        on which one of them is 0. Where all codes of a block are equal, any pair with the least error.

    Source: the normal equations of two unknowns.
    """
    # BEGIN SOLUTION
    weighted = weights * codes
    sums = (weights.expand_as(values), weighted, weighted * codes, weights * values, weighted * values)
    one, c, cc, v, cv = (numbers.sum(-1, keepdim=True) for numbers in sums)
    determinant = cc * one - c * c
    # Codes that hardly differ have no answer in float32; a border is as good then.
    solvable = determinant > 1e-6 * cc * one
    divisor = torch.where(solvable, determinant, 1)
    scale, minimum = (cv * one - c * v) / divisor, (cv * c - v * cc) / divisor
    inside = solvable & (scale >= 0) & (minimum >= 0)
    only_scale, only_minimum = _quotient(cv, cc).clamp(min=0), (-v / one).clamp(min=0)
    rather_scale = only_scale * cv >= only_minimum * -v
    scale = torch.where(inside, scale, torch.where(rather_scale, only_scale, 0))
    return scale, torch.where(inside, minimum, torch.where(rather_scale, 0, only_minimum))
    # END SOLUTION


def fit_scale_min(values: Tensor, weights: Tensor, levels: int = 15) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each block for value ≈ scale · code − minimum with codes from 0 to `levels`.

    Neither is negative, since the format stores them without a sign; so 0 is always in range. What counts is the
    weighted error with the nearest code for each value.

    Args:
        values: `[..., n]` finite float32 or float64; each row of n is a block.
        weights: above 0, of a shape that broadcasts to that of `values`.
        levels: the largest code.

    Returns:
        Scale and minimum, `[..., 1]` each. Their error is in no block above that of the plain choice: the minimum
        −min(lowest, 0), and a scale that puts max(highest, 0) on the last code.

    Source: module section 4.2, k-quants.
    """
    # BEGIN SOLUTION
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    best = (high - low) / levels, -low
    codes = nearest_codes(values, *best, 0, levels)
    least = weighted_error(values, best[0] * codes - best[1], weights)
    for low_reach, high_reach in product(_REACHES, repeat=2):
        scale, minimum = (high_reach * high - low_reach * low) / levels, -low_reach * low
        codes = nearest_codes(values, scale, minimum, 0, levels)
        for _ in range(_ROUNDS):
            scale, minimum = least_squares(values, weights, codes)
            codes = nearest_codes(values, scale, minimum, 0, levels)
            error = weighted_error(values, scale * codes - minimum, weights)
            better = error < least
            best = torch.where(better, scale, best[0]), torch.where(better, minimum, best[1])
            least = torch.where(better, error, least)
    return best
    # END SOLUTION


def fit_scale(values: Tensor, weights: Tensor, limit: int = 32) -> Tensor:
    """Scale of each block for value ≈ scale · code with codes from −limit to limit − 1.

    The scale may be negative: then the extra code on the negative side serves the positive values.

    Args:
        values: `[..., n]` finite float32 or float64; each row of n is a block.
        weights: above 0, of a shape that broadcasts to that of `values`.
        limit: 2^(bits − 1).

    Returns:
        The scale, `[..., 1]`. Its error is in no block above that of the plain choice, which puts the value of
        largest magnitude on the code −limit.

    Source: module section 4.2, k-quants.
    """
    # BEGIN SOLUTION
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    best = -extreme / limit
    least = weighted_error(values, best * nearest_codes(values, best, 0.0, -limit, limit - 1), weights)
    for reach in _REACHES:
        for code in (-limit, limit - 1):
            scale = reach * extreme / code
            codes = nearest_codes(values, scale, 0.0, -limit, limit - 1)
            for _ in range(_ROUNDS):
                weighted = weights * codes
                scale = _quotient((weighted * values).sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True))
                codes = nearest_codes(values, scale, 0.0, -limit, limit - 1)
                error = weighted_error(values, scale * codes, weights)
                best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best
    # END SOLUTION


# BEGIN SOLUTION
def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the latter is 0."""
    return torch.where(denominator == 0, 0, numerator / torch.where(denominator == 0, 1, denominator))


# END SOLUTION
