"""Sampling on plain Python lists, one row at a time, straight from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams

Row = list[float]


def apply_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """exp((x - max) / T), normalised with an exact sum."""
    rows = _rows(logits)
    _settings(temperatures, len(rows))
    for number, row in enumerate(rows):
        if any(x != x or x == math.inf for x in row) or max(row) == -math.inf:
            raise ValueError(f"row {number} is no row of logits: NaN, +inf or no token at all")
    return _tensor([_softmax(row, temperature) for row, temperature in zip(rows, temperatures, strict=True)])


def _softmax(row: Row, temperature: float) -> Row:
    top = max(row)
    if temperature == 0:
        first = row.index(top)
        return [float(token == first) for token in range(len(row))]
    # Quotients beyond the range of floats are -inf, whose exponential is 0.
    return _normalised([math.exp((x - top) / temperature) for x in row])


def keep_top_k(probs: Tensor, k: Sequence[int]) -> Tensor:
    """The first k in the order of rank."""
    return _filtered(probs, k, lambda row, count: _by_rank(row)[: count or len(row)], whole=True)


def keep_top_p(probs: Tensor, p: Sequence[float]) -> Tensor:
    """Takes tokens until their mass is enough."""

    def survivors(row: Row, mass: float) -> list[int]:
        taken: list[int] = []
        total = 0.0
        for token in _by_rank(row):
            taken.append(token)
            total += row[token]
            if total >= mass and mass < 1:
                break
        return taken

    return _filtered(probs, p, survivors)


def keep_min_p(probs: Tensor, m: Sequence[float]) -> Tensor:
    """Everything that reaches a share of the largest, or else the largest."""

    def survivors(row: Row, share: float) -> list[int]:
        return [token for token, p in enumerate(row) if p >= share * max(row)] or _by_rank(row)[:1]

    return _filtered(probs, m, survivors)


def token_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Each row on its own through the four steps."""
    rows = _rows(logits)
    if len(params) != len(rows):
        raise ValueError(f"{len(params)} params for {len(rows)} rows")
    probs = apply_temperature(logits, [p.temperature for p in params])
    done = []
    for row, p in zip(probs, params, strict=True):
        one = keep_top_k(row.unsqueeze(0), [p.top_k])
        done.append(keep_min_p(keep_top_p(one, [p.top_p]), [p.min_p]))
    return torch.cat(done)


def draw(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Walks along the possible tokens until the cumulative sum has passed the uniform."""
    rows = _distributions(probs)
    _settings(uniforms, len(rows))
    if any(u >= 1 for u in uniforms):
        raise ValueError(f"uniforms must be below 1, got {list(uniforms)}")
    tokens = []
    for row, u in zip(rows, uniforms, strict=True):
        possible = [token for token, p in enumerate(row) if p > 0]
        total, chosen = 0.0, possible[-1]
        for token in possible:
            total += row[token]
            if total > u:
                chosen = token
                break
        tokens.append(chosen)
    return torch.tensor(tokens)


def sample(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> Tensor:
    """The distribution, then one number for each row."""
    _settings(steps, logits.shape[0], whole=True)
    probs = token_distribution(logits, params)
    return draw(probs, [uniform(params[row].seed, steps[row]) for row in range(len(params))])


class Sampler:
    """Choice for one request."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def __call__(self, logits: Tensor, step: int) -> int:
        """The token of a step."""
        if logits.dim() != 1:
            raise ValueError(f"one row of logits, please, not shape {list(logits.shape)}")
        return sample(logits[None], [self.params], [step]).item()  # type: ignore[return-value]


def _filtered(
    probs: Tensor, settings: Sequence[Any], survivors: Callable[[Row, Any], list[int]], whole: bool = False
) -> Tensor:
    rows = _distributions(probs)
    _settings(settings, len(rows), whole)
    kept = []
    for row, setting in zip(rows, settings, strict=True):
        tokens = set(survivors(row, setting))
        kept.append(_normalised([p if token in tokens else 0.0 for token, p in enumerate(row)]))
    return _tensor(kept)


def _by_rank(row: Row) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def _normalised(row: Row) -> Row:
    total = math.fsum(row)
    return [p / total for p in row]


def _rows(values: Tensor) -> list[Row]:
    if values.dim() != 2 or 0 in values.shape or not values.is_floating_point():
        raise ValueError(f"need floating point [batch, vocab], got {values.dtype} {list(values.shape)}")
    return values.double().tolist()


def _distributions(probs: Tensor) -> list[Row]:
    rows = _rows(probs)
    for number, row in enumerate(rows):
        if not min(row) >= 0 or not abs(sum(row) - 1) < 1e-3:
            raise ValueError(f"row {number} is no distribution")
    return rows


def _settings(values: Sequence[float], batch: int, whole: bool = False) -> None:
    if len(values) != batch:
        raise ValueError(f"{len(values)} settings for {batch} rows")
    for number, value in enumerate(values):
        if type(value) not in ((int,) if whole else (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"row {number}: {value!r} is no possible setting")


def _tensor(rows: list[Row]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
