"""A fine grid of ranges, all tried at once; nothing is solved but what the codes are asked for."""

from __future__ import annotations

import torch
from torch import Tensor


def nearest_codes(values: Tensor, scale: Tensor, minimum: Tensor | float, low: int, high: int) -> Tensor:
    """As given."""
    return ((values + minimum) / torch.where(scale == 0, 1, scale)).round().clamp(low, high)


def weighted_error(values: Tensor, approximation: Tensor, weights: Tensor) -> Tensor:
    """As given."""
    return (weights * (approximation - values).square()).sum(-1, keepdim=True)


def least_squares(values: Tensor, weights: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The slope from deviations of the weighted means; each row by itself."""
    pairs = [_pair(*row) for row in zip(values, weights.expand_as(values), codes, strict=True)]
    return tuple(torch.stack(numbers).unsqueeze(-1) for numbers in zip(*pairs, strict=True))  # type: ignore[return-value]


def _pair(x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    w = w / w.sum()
    mean_x, mean_q = w @ x, w @ q
    spread = w @ (q - mean_q) ** 2
    zero = torch.zeros_like(mean_x)
    candidates = [(zero, (-mean_x).clamp(min=0))]
    if w @ q**2 > 0:
        candidates.append((((w * q) @ x / (w @ q**2)).clamp(min=0), zero))
    if spread > 1e-7 * mean_q**2:
        slope = (w * (q - mean_q)) @ (x - mean_x) / spread
        if slope >= 0 and slope * mean_q >= mean_x:
            candidates.append((slope, slope * mean_q - mean_x))
    return min(candidates, key=lambda pair: float(w @ (pair[0] * q - pair[1] - x) ** 2))


def fit_scale_min(values: Tensor, weights: Tensor, levels: int = 15) -> tuple[Tensor, Tensor]:
    """The best of 13 times 13 ranges."""
    bottom, top = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    best = (top - bottom) / levels, -bottom
    least = weighted_error(values, best[0] * nearest_codes(values, *best, 0, levels) - best[1], weights)
    for i in range(13):
        for j in range(13):
            low, high = bottom * (1.06 - 0.04 * i), top * (1.06 - 0.04 * j)
            pair = (high - low) / levels, -low
            error = weighted_error(values, pair[0] * nearest_codes(values, *pair, 0, levels) - pair[1], weights)
            best = tuple(torch.where(error < least, new, old) for new, old in zip(pair, best, strict=True))
            least = torch.minimum(error, least)
    return best


def fit_scale(values: Tensor, weights: Tensor, limit: int = 32) -> Tensor:
    """The best of 160 scales of either sign."""
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    shares = torch.cat((torch.ones(1), torch.linspace(1.1, 0.5, 80))).to(values.dtype) / limit
    scales = extreme.unsqueeze(-2) * torch.cat((-shares, shares)).unsqueeze(-1)
    wide, counts = values.unsqueeze(-2), weights.unsqueeze(-2)
    errors = weighted_error(wide, scales * nearest_codes(wide, scales, 0.0, -limit, limit - 1), counts)
    return scales.gather(-2, errors.argmin(-2, keepdim=True)).squeeze(-2)
