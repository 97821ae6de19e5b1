"""Task 5b: AWQ, which scales up the weights that meet large activations before all are rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_bits, check_finite, check_matrix

from .uniform import dequantize, quantize

LEAST_SALIENCE = 1e-4
"""Of the largest one: a feature that is nearly always 0 must not ask for a scale of 0."""

RoundToNearest = Callable[[Tensor, int, int, bool], Tensor]


def round_to_nearest(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
    """What a weight becomes by rounding it in groups: task 1's `quantize`, and back."""
    return dequantize(quantize(weight, bits, symmetric=symmetric, group_size=group_size))


def salience(inputs: Tensor) -> Tensor:
    """How large each feature is on average: the weights that it meets matter that much.

    Args:
        inputs: what the layer reads, floating point `[..., in]`, at least one token.

    Returns:
        mean |x| over all tokens, `[in]`, float64 for float64 inputs, else float32.

    Raises:
        ValueError: inputs that aren't finite or hold no token.

    Source: Lin et al. 2023 (2306.00978), section 3.1; module section 4.3.
    """
    _check_inputs(inputs)
    # BEGIN SOLUTION
    x = inputs.flatten(0, -2)
    return x.to(torch.promote_types(x.dtype, torch.float32)).abs().mean(0)
    # END SOLUTION


def search_scales(
    weights: Sequence[Tensor],
    inputs: Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    grid: int = 20,
    round_to_nearest: RoundToNearest = round_to_nearest,
) -> Tensor:
    """The scales that make rounding harm the layer's outputs least, among salience^α with α = 0, 1/grid, …, 1.

    A candidate multiplies column j of every weight by s_j before rounding and divides by it afterwards; its error is
    the sum of ‖X (W − Q(W diag(s)) diag(s)⁻¹)ᵀ‖² over the weights. Of equal errors the smallest α wins. α = 0 leaves
    the weights alone, so the result is never worse than rounding to nearest on these inputs.

    Args:
        weights: matrices that read the same inputs and so must share the scales, each `[out, in]`; at least one.
        inputs: what they read, floating point `[..., in]`, at least one token.
        bits: of a code, 2 to 8.
        group_size: columns that share a scale of the quantizer, at least 1.
        symmetric: without a zero point.
        grid: steps of α, at least 1.
        round_to_nearest: called as `round_to_nearest(weight, bits, group_size, symmetric)`; gives what the weight
            becomes.

    Returns:
        Scales `[in]`, positive and finite, float64 for float64 inputs, else float32. Features below `LEAST_SALIENCE`
        of the largest salience count as that. The scales are divided by √(max · min), so that they lie around 1; all
        are 1 if every input is 0.

    Raises:
        ValueError: no weight, another width, numbers that aren't finite, another number of bits, or a size or grid
            below 1.

    Source: Lin et al. 2023 (2306.00978), section 3.2.
    """
    _check_inputs(inputs)
    if isinstance(weights, Tensor) or not weights:
        raise ValueError("weights must be a sequence of at least one matrix, (weight,) for one")
    for index, weight in enumerate(weights):
        check_matrix(f"weights[{index}]", weight)
        if weight.shape[1] != inputs.shape[-1]:
            raise ValueError(f"weights[{index}] reads {weight.shape[1]} features, but inputs have {inputs.shape[-1]}")
    check_bits(bits)
    check_count("group_size", group_size, 1)
    check_count("grid", grid, 1)
    # BEGIN SOLUTION
    x = inputs.flatten(0, -2).to(torch.promote_types(inputs.dtype, torch.float32))
    mean = salience(x)
    if not bool(mean.any()):
        return torch.ones_like(mean)
    share = (mean / mean.max()).clamp(min=LEAST_SALIENCE)
    best, least = torch.ones_like(mean), float("inf")
    for step in range(grid + 1):
        scales = share ** (step / grid)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = 0.0
        for weight in weights:
            wide = weight.to(x.dtype)
            change = wide - round_to_nearest(wide * scales, bits, group_size, symmetric) / scales
            error += float((x @ change.T).square().sum(dtype=torch.float64))
        if error < least:
            best, least = scales, error
    return best
    # END SOLUTION


def _check_inputs(inputs: Tensor) -> None:
    """Refuse anything but tokens of finite features."""
    if inputs.dim() < 2 or inputs.numel() == 0:
        raise ValueError(f"inputs must be [..., in] with at least one token, got shape {list(inputs.shape)}")
    check_finite("inputs", inputs)
