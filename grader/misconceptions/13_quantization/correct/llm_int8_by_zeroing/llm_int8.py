"""LLM.int8() with masks in place of slices: outliers are zeroed in one half of the sum, all others in the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .uniform import quantize as own_quantize


def outlier_features(x: Tensor, threshold: float = 6.0) -> Tensor:
    """By the largest magnitude of each feature."""
    _refuse(x, threshold)
    return x.abs().flatten(0, -2).amax(0) >= threshold if x.dim() > 1 else x.abs() >= threshold


def llm_int8_linear(x: Tensor, weight: Tensor, threshold: float = 6.0, *, quantize: Any = own_quantize) -> Tensor:
    """Zeros add nothing to a sum and set no scale, so nothing needs to be taken out."""
    _refuse(x, threshold)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}")
    for row, column in (~weight.isfinite()).nonzero().tolist():
        raise ValueError(f"weight is not finite at [{row}, {column}]")
    keep = outlier_features(x, threshold).float()
    tokens, channels = x.reshape(-1, x.shape[-1]).float(), weight.float()
    codes, scales = [], []
    for matrix, granularity in ((tokens, "token"), (channels, "channel")):
        q = quantize(matrix * (1 - keep), 8, granularity=granularity)
        codes.append(q.codes.double())
        scales.append(q.scale)
    # Sums of products of int8 are exact in float64.
    whole = (codes[0] @ codes[1].T).float() * (scales[0] @ scales[1].T)
    y = whole + torch.einsum("ti,oi->to", tokens * keep, channels)
    return y.unflatten(0, x.shape[:-1]).to(x.dtype) if x.dim() != 2 and x.dim() > 1 else _like(y, x)


def _like(y: Tensor, x: Tensor) -> Tensor:
    return (y if x.dim() == 2 else y[0]).to(x.dtype)


def _refuse(x: Tensor, threshold: float) -> None:
    if not x.numel() or not x.is_floating_point():
        raise ValueError(f"x has no tokens, or no floating numbers: {list(x.shape)} of {x.dtype}")
    for place in (~x.isfinite()).nonzero().tolist():
        raise ValueError(f"x is not finite at {place}")
    if not 0 < threshold < float("inf"):
        raise ValueError(f"threshold {threshold} tells no outliers")
