"""Plain Python numbers, one row after another."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor

ROUNDING = 1e-3


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """1 minus half the sum of the differences."""
    _same(p, q)
    return 1 - (check_distributions("p", p) - check_distributions("q", q)).abs().sum(-1) / 2


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is above q, row by row."""
    _same(p, q)
    p, q = check_distributions("p", p), check_distributions("q", q)
    rows = [_residual(a, b) for a, b in zip(_rows(p), _rows(q), strict=True)]
    return torch.tensor(rows, dtype=torch.float64).reshape(p.shape)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Bisection in the running sum, which ends at the last possible token."""
    probs = check_distributions("probs", probs)
    uniforms = check_uniforms("uniforms", uniforms, probs.shape[:-1])
    drawn = [_draw(row, u) for row, u in zip(_rows(probs), uniforms.reshape(-1).tolist(), strict=True)]
    return torch.tensor(drawn, dtype=torch.int64).reshape(uniforms.shape)


def accept_or_resample(
    p: Tensor, q: Tensor, drafts: Tensor, accept_uniforms: Tensor, resample_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """u q(x) < p(x) instead of u < p(x) / q(x)."""
    _same(p, q)
    p, q = check_distributions("p", p), check_distributions("q", q)
    drafts = check_drafts(drafts, q)
    judges = check_uniforms("accept_uniforms", accept_uniforms, drafts.shape).tolist()
    draws = check_uniforms("resample_uniforms", resample_uniforms, drafts.shape).tolist()
    accepted, tokens = [], []
    chosen = drafts.reshape(-1).tolist()
    for a, b, x, judge, u in zip(_rows(p), _rows(q), chosen, _flat(judges), _flat(draws), strict=True):
        accepted.append(judge * b[x] < a[x])
        tokens.append(x if accepted[-1] else _draw(_residual(a, b), u))
    kept = torch.tensor(accepted, dtype=torch.bool).reshape(drafts.shape)
    return kept, torch.tensor(tokens, dtype=torch.int64).reshape(drafts.shape)


def check_distributions(name: str, probs: Tensor) -> Tensor:
    """Rows that add up to 1."""
    if not probs.is_floating_point() or probs.dim() == 0 or probs.shape[-1] == 0:
        raise ValueError(f"{name} needs rows of probabilities")
    wide = probs.double()
    sums = wide.sum(-1, keepdim=True)
    if not bool((wide >= 0).all()) or not bool(((sums - 1).abs() <= ROUNDING).all()):
        raise ValueError(f"{name} has a row that is no distribution")
    return wide / sums


def check_uniforms(name: str, uniforms: Tensor, shape: torch.Size) -> Tensor:
    """Numbers in [0, 1)."""
    if tuple(uniforms.shape) != tuple(shape) or not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError(f"{name} must have shape {tuple(shape)} and lie in [0, 1)")
    return uniforms.double()


def check_drafts(drafts: Tensor, q: Tensor) -> Tensor:
    """Ids that q can have drawn."""
    if drafts.dtype != torch.int64 or drafts.shape != q.shape[:-1]:
        raise ValueError(f"drafts must be int64 {list(q.shape[:-1])}")
    for row, x in zip(_rows(q), drafts.reshape(-1).tolist(), strict=True):
        if not 0 <= x < len(row) or row[x] <= 0:
            raise ValueError(f"draft {x} can't come from q")
    return drafts


def can_have_drawn(row: Tensor | None, token: int) -> bool:
    """An id within a row that is a distribution, and not impossible there."""
    if type(token) is not int or token < 0 or row is None:
        return type(token) is int and token >= 0
    try:
        return float(check_distributions("row", row.double())[token]) > 0
    except (ValueError, IndexError):
        return False


def _rows(probs: Tensor) -> list[list[float]]:
    return probs.reshape(-1, probs.shape[-1]).tolist()


def _flat(nested: list) -> list[float]:
    return [x for part in nested for x in (_flat(part) if isinstance(part, list) else [part])]


def _residual(a: list[float], b: list[float]) -> list[float]:
    excess = [max(0.0, x - y) for x, y in zip(a, b, strict=True)]
    total = sum(excess)
    return [x / total for x in excess] if total > 0 else a


def _draw(row: list[float], u: float) -> int:
    possible = max(i for i, x in enumerate(row) if x > 0)
    return min(bisect_right(list(accumulate(row)), u), possible)


def _same(p: Tensor, q: Tensor) -> None:
    if p.shape != q.shape:
        raise ValueError(f"p and q differ in shape: {list(p.shape)} and {list(q.shape)}")
