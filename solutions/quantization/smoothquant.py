"""Task 6: SmoothQuant, which moves outliers from activations to weights until both can be 8-bit integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from labkit.quantization_checks import check_finite, check_matrix, check_quantized
from labkit.quantized import QuantizedTensor

from .folding import fold_scales
from .uniform import quantize

LEAST_MAXIMUM = 1e-5
"""A smaller maximum counts as this: 0 / 0 is NaN, and NaN survives a clamp that comes too late."""

MOST_FEATURES = (2**31 - 1) // 128**2
"""Products of two int8 that an int32 can certainly add up."""

FoldScales = Callable[
    [Sequence[Tensor], Sequence[Tensor], Tensor], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
]  # fmt: skip


class Quantize(Protocol):
    """Task 1's function."""

    def __call__(self, x: Tensor, bits: int, *, granularity: str) -> QuantizedTensor:
        """A matrix in integers."""


def migration_scales(activation_max: Tensor, weights: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """By how much to divide each feature, and to multiply the weights that it meets.

    Args:
        activation_max: max |x| of each feature over calibration tokens, `[in]`, at least 0.
        weights: matrices that read these features, each `[out, in]`; at least one.
        alpha: 0 leaves the outliers where they are (and flattens the weights), 1 moves them to the weights entirely.

    Returns:
        s_j = max|X_j|^α / max|W_j|^(1−α), with the maximum over all weights; `[in]`, float64 if activation_max is,
        else float32. Both maxima are at least `LEAST_MAXIMUM` before the division, so that features or columns of
        zeros get a positive, finite scale.

    Raises:
        ValueError: no weight, another width, numbers that aren't finite, a maximum below 0, or an alpha outside 0
            to 1.

    Source: Xiao et al. 2022 (2211.10438), equation 4; module section 4.3.
    """
    check_finite("activation_max", activation_max)
    if activation_max.dim() != 1 or activation_max.numel() == 0 or bool((activation_max < 0).any()):
        raise ValueError(
            f"activation_max must be [in] and at least 0, the largest |x| of each feature, got shape "
            f"{list(activation_max.shape)}{' with a number below 0' if bool((activation_max < 0).any()) else ''}"
        )
    if isinstance(weights, Tensor) or not weights:
        raise ValueError("weights must be a sequence of at least one matrix, (weight,) for one")
    for index, weight in enumerate(weights):
        check_matrix(f"weights[{index}]", weight)
        if weight.shape[1] != activation_max.shape[0]:
            raise ValueError(
                f"weights[{index}] reads {weight.shape[1]} features, but activation_max has {activation_max.shape[0]}"
            )
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be a number from 0 to 1, got {alpha!r}")
    # BEGIN SOLUTION
    activations = activation_max.to(torch.promote_types(activation_max.dtype, torch.float32))
    columns = torch.stack([weight.abs().amax(0).to(activations.dtype) for weight in weights]).amax(0)
    return activations.clamp(min=LEAST_MAXIMUM) ** alpha / columns.clamp(min=LEAST_MAXIMUM) ** (1 - alpha)
    # END SOLUTION


def smooth(
    producers: Sequence[Tensor],
    weights: Sequence[Tensor],
    activation_max: Tensor,
    alpha: float = 0.5,
    *,
    fold_scales: FoldScales = fold_scales,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Make the inputs of some layers smoother, and leave the layers' outputs as they are.

    Args:
        producers: what makes the features, as in `fold_scales`.
        weights: all matrices that read them, each `[out, in]`.
        activation_max: max |x| of each feature, `[in]`.
        alpha: as in `migration_scales`.
        fold_scales: task 5's function, called with producers, weights and scales.

    Returns:
        The new producers, the new weights, and the scales by which the features shrank, `[in]`.

    Raises:
        ValueError: as `migration_scales` and `fold_scales`.

    Source: Xiao et al. 2022 (2211.10438), section 4.
    """
    # BEGIN SOLUTION
    scales = migration_scales(activation_max, weights, alpha)
    return *fold_scales(producers, weights, scales), scales
    # END SOLUTION


def w8a8_linear(
    x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None, *, quantize: Quantize = quantize
) -> Tensor:
    """A linear layer in integers: 8-bit activations times 8-bit weights, added up in int32, then scaled once.

    Each token gets its scale now, from its own largest number: y = s_token · s_row · Σ_j x_j w_j.

    Args:
        x: floating point `[..., in]`, at least one token.
        weight: symmetric codes `[out, in]` with one scale a row, `[out, 1]`, or one for all, `[1, 1]`.
        bias: `[out]`; added after the scaling.
        quantize: task 1's function, called as `quantize(tokens, 8, granularity="token")`.

    Returns:
        `[..., out]` of x's dtype; scaled in at least float32 and rounded once.

    Raises:
        ValueError: x that isn't finite or doesn't fit, a weight with a zero point or with scales within a row (they
            can't be taken out of the sum), a bias of another shape, or more features than an int32 can add up.

    Source: Xiao et al. 2022 (2211.10438), equation 2; module section 4.2.
    """
    check_finite("x", x)
    check_quantized("weight", weight)
    out, width = weight.codes.shape
    if x.dim() == 0 or x.shape[-1] != width or x.numel() == 0:
        raise ValueError(f"x must be [..., {width}] with at least one token, got shape {list(x.shape)}")
    if weight.zero_point is not None or weight.scale.shape[1] != 1:
        raise ValueError(
            f"weight must be symmetric with one scale a row, got scale {list(weight.scale.shape)} for {width} columns"
            f"{'' if weight.zero_point is None else ' and a zero point'}: quantize it per channel"
        )
    if width > MOST_FEATURES:
        raise ValueError(f"an int32 can add up {MOST_FEATURES} products of int8, got {width} features; split them")
    if bias is not None and tuple(bias.shape) != (out,):
        raise ValueError(f"bias must be [{out}], got {list(bias.shape)}")
    # BEGIN SOLUTION
    tokens = quantize(x.reshape(-1, width), 8, granularity="token")
    sums = tokens.codes.to(torch.int32) @ weight.codes.to(torch.int32).T
    wide = torch.promote_types(x.dtype, torch.float32)
    y = sums.to(wide) * tokens.scale * weight.scale.T.to(wide)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], out)
    # END SOLUTION
