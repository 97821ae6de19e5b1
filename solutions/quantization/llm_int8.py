"""Task 11: LLM.int8(), a product in 8-bit integers but for the few features that hold the outliers."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from labkit.quantization_checks import check_finite, check_matrix
from labkit.quantized import QuantizedTensor

from .uniform import quantize


class Quantize(Protocol):
    """Task 1's function."""

    def __call__(self, x: Tensor, bits: int, *, granularity: str) -> QuantizedTensor:
        """A matrix in integers."""


def outlier_features(x: Tensor, threshold: float = 6.0) -> Tensor:
    """Which features are of magnitude `threshold` or more at one token at least.

    Args:
        x: floating point `[..., in]`, at least one token.
        threshold: positive and finite.

    Returns:
        bool, `[in]`.

    Raises:
        ValueError: x is empty, isn't finite or has no axis; or no such threshold.

    Source: LLM.int8() (2208.07339), section 3.2.
    """
    _check(x, threshold)
    # BEGIN SOLUTION
    return (x.abs() >= threshold).reshape(-1, x.shape[-1]).any(0)
    # END SOLUTION


def llm_int8_linear(x: Tensor, weight: Tensor, threshold: float = 6.0, *, quantize: Quantize = quantize) -> Tensor:
    """x times the transposed weight: outlier features in full precision, all others in 8-bit integers.

    The others are quantized vector-wise, that is with one scale for each token of x and one for each output channel of
    the weight, after the outlier features have left. Products are added up in int32:
    y = Σ_{outliers} x_j w_j + s_token · s_channel · Σ_{others} x_j w_j in integers.

    Args:
        x: floating point `[..., in]`, at least one token.
        weight: `[out, in]`.
        threshold: from which magnitude on a feature is an outlier; positive and finite.
        quantize: task 1's function, called as `quantize(tokens, 8, granularity="token")` and
            `quantize(weight, 8, granularity="channel")`, and never with an empty matrix.

    Returns:
        `[..., out]` of x's dtype; computed in at least float32 and rounded once.

    Raises:
        ValueError: x or weight is empty, isn't finite or doesn't fit the other; or no such threshold.

    Source: LLM.int8() (2208.07339), equation 8; module section 4.3.
    """
    _check(x, threshold)
    check_matrix("weight", weight)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"weight has {weight.shape[1]} input features, but x has {x.shape[-1]}")
    # BEGIN SOLUTION
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens, outlier = x.reshape(-1, x.shape[-1]).to(wide), outlier_features(x, threshold)
    y = tokens[:, outlier] @ weight[:, outlier].to(wide).T
    if not bool(outlier.all()):
        q_x = quantize(tokens[:, ~outlier], 8, granularity="token")
        q_w = quantize(weight[:, ~outlier].to(wide), 8, granularity="channel")
        sums = q_x.codes.to(torch.int32) @ q_w.codes.to(torch.int32).T
        y = y + sums.to(wide) * q_x.scale * q_w.scale.T
    return y.to(x.dtype).reshape(*x.shape[:-1], len(weight))
    # END SOLUTION


def _check(x: Tensor, threshold: float) -> None:
    """Refuse activations and thresholds that no outlier can be told by."""
    check_finite("x", x)
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"x must be [..., in] with at least one token, got shape {list(x.shape)}")
    if isinstance(threshold, bool) or not (math.isfinite(threshold) and threshold > 0):
        raise ValueError(f"threshold must be a finite number above 0, got {threshold!r}")
