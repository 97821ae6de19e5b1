"""The search without outputs: their squared error is a quadratic form in the Gram matrix XᵀX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .uniform import dequantize, quantize


def _nearest(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
    return dequantize(quantize(weight, bits, symmetric=symmetric, granularity="group", group_size=group_size))


def salience(inputs: Tensor) -> Tensor:
    """Token after token, in float64."""
    if inputs.dim() < 2 or inputs.numel() == 0:
        raise ValueError(f"inputs must hold tokens, got {list(inputs.shape)}")
    if not bool(inputs.isfinite().all()):
        raise ValueError("inputs must be finite")
    total = torch.zeros(inputs.shape[-1], dtype=torch.float64)
    rows = inputs.reshape(-1, inputs.shape[-1]).double()
    for row in rows:
        total += torch.maximum(row, -row)
    return (total / len(rows)).to(torch.float64 if inputs.dtype == torch.float64 else torch.float32)


def search_scales(
    weights: Sequence[Tensor],
    inputs: Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    grid: int = 20,
    round_to_nearest: Callable[[Tensor, int, int, bool], Tensor] = _nearest,
) -> Tensor:
    """All weights stacked: rows are rounded independently, so one matrix will do."""
    mean = salience(inputs).double()
    for name, value, least, most in (
        ("bits", bits, 2, 8), ("group_size", group_size, 1, 1 << 40), ("grid", grid, 1, 1 << 20)
    ):  # fmt: skip
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    if not weights:
        raise ValueError("weights must not be empty")
    for index, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != len(mean) or not bool(weight.isfinite().all()):
            raise ValueError(f"weights[{index}] must be a finite matrix of {len(mean)} columns")
    kept = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    if not float(mean.max()):
        return torch.ones(len(mean), dtype=kept)
    logs = (mean / mean.max()).clamp(min=1e-4).log()
    x = inputs.reshape(-1, len(mean)).double()
    gram = x.T @ x
    stacked = torch.cat([weight.double() for weight in weights])
    ranked = []
    for step in range(grid + 1):
        exponents = logs * (step / grid)
        scales = (exponents - (exponents.max() + exponents.min()) / 2).exp()
        change = stacked - round_to_nearest(stacked * scales, bits, group_size, symmetric) / scales
        ranked.append((math.fsum(float(row @ gram @ row) for row in change), step, scales))
    return min(ranked, key=lambda entry: entry[:2])[2].to(kept)
