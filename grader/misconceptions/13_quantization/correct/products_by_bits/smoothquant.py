"""Integer products bit by bit: the codes of the tokens are taken apart into powers of two, which select weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.quantized import QuantizedTensor

from .folding import fold_scales
from .uniform import quantize


def migration_scales(activation_max: Tensor, weights: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """By logarithms, over all rows of all weights at once."""
    if activation_max.dim() != 1 or not bool((activation_max >= 0).all()) or not bool(activation_max.isfinite().all()):
        raise ValueError("activation_max must be [in], finite and at least 0")
    if len(weights) == 0:
        raise ValueError("weights must not be empty")
    for index, weight in enumerate(weights):
        if weight.shape[-1] != len(activation_max):
            raise ValueError(f"weights[{index}] has {weight.shape[-1]} columns, {len(activation_max)} are wanted")
        if not bool(weight.isfinite().all()):
            raise ValueError(f"weights[{index}] must be finite")
    if type(alpha) not in (int, float) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, got {alpha!r}")
    rows = torch.cat([weight.double() for weight in weights])
    columns = torch.maximum(rows.max(0).values, -rows.min(0).values)
    floor = torch.tensor(1e-5, dtype=torch.float64)
    logs = alpha * torch.maximum(activation_max.double(), floor).log()
    logs = logs - (1 - alpha) * torch.maximum(columns, floor).log()
    return logs.exp().to(torch.float64 if activation_max.dtype == torch.float64 else torch.float32)


def smooth(
    producers: Sequence[Tensor],
    weights: Sequence[Tensor],
    activation_max: Tensor,
    alpha: float = 0.5,
    *,
    fold_scales: Callable[..., Any] = fold_scales,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Scales first, then folding."""
    scales = migration_scales(activation_max, weights, alpha)
    made, read = fold_scales(producers, weights, scales)
    return tuple(made), tuple(read), scales


def w8a8_linear(
    x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None, *, quantize: Callable[..., Any] = quantize
) -> Tensor:
    """x = Σ 2^b x_b − 128 with bits x_b: eight sums of selected weights, shifted and added."""
    out, width = weight.codes.shape
    if not bool(x.isfinite().all()):
        raise ValueError("x must be finite")
    if x.shape[-1:] != (width,) or x.numel() == 0:
        raise ValueError(f"x must be [..., {width}], got {list(x.shape)}")
    if weight.zero_point is not None or weight.group_size < width:
        raise ValueError("weight must be symmetric and have one scale a row")
    if width * 128 * 128 >= 2**31:
        raise ValueError(f"{width} products of int8 may not fit into an int32")
    if bias is not None and bias.shape != (out,):
        raise ValueError(f"bias must have {out} entries, got {list(bias.shape)}")
    tokens = quantize(x.reshape(-1, width), 8, granularity="token")
    shifted = tokens.codes.int() + 128
    columns = weight.codes.int().T
    sums = -128 * columns.sum(0, dtype=torch.int32)
    for bit in range(8):
        sums = sums + (((shifted >> bit) & 1) @ columns) * 2**bit
    answer = sums.double() * (tokens.scale.double() * weight.scale.double().T)
    if bias is not None:
        answer += bias.double()
    return answer.to(x.dtype).reshape(*x.shape[:-1], out)
