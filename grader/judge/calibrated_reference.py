"""Calibrated quantization from first principles, in float64: what tests of GPTQ, AWQ and SmoothQuant compare with.

Nothing here updates an inverse or keeps a running anything: each answer is written as the solution of the problem that
the method solves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.quantized import QuantizedTensor


def nearest_params(values: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of one group of each row, as task 1 defines them, in the dtype of the values.

    Args:
        values: `[rows, n]`.
        bits: of a code.
        symmetric: without a zero point.
    """
    if symmetric:
        span = values.abs().max(1, keepdim=True).values / (2 ** (bits - 1) - 1)
        return torch.where(span > 0, span, torch.ones_like(span)), None
    low = torch.minimum(values.min(1, keepdim=True).values, torch.zeros_like(values[:, :1]))
    high = torch.maximum(values.max(1, keepdim=True).values, torch.zeros_like(values[:, :1]))
    span = (high - low) / (2**bits - 1)
    span = torch.where(span > 0, span, torch.ones_like(span))
    zero = torch.round(-low / span)
    return span, zero.to(torch.int8 if bits < 8 else torch.int16)


def nearest_codes(x: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> Tensor:
    """Codes of numbers, as task 1 defines them."""
    if zero_point is None:
        codes = torch.round(x / scale).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return codes.to(torch.int8)
    codes = (torch.round(x / scale) + zero_point).clamp(0, 2**bits - 1)
    return codes.to(torch.int8 if bits < 8 else torch.int16)


def round_to_nearest(weight: Tensor, bits: int, group_size: int, symmetric: bool = True) -> Tensor:
    """What a weight becomes by plain rounding in groups; dtype of the weight."""
    parts = []
    for group in weight.split(group_size, dim=1):
        scale, zero = nearest_params(group, bits, symmetric)
        codes = nearest_codes(group, scale, zero, bits).to(weight.dtype)
        parts.append(scale * (codes if zero is None else codes - zero))
    return torch.cat(parts, 1)


def values_of(q: QuantizedTensor) -> Tensor:
    """The matrix that codes, scales and zero points stand for, float64, column by column."""
    columns = []
    for column in range(q.codes.shape[1]):
        group = column // q.group_size
        code = q.codes[:, column].double()
        if q.zero_point is not None:
            code = code - q.zero_point[:, group].double()
        columns.append(q.scale[:, group].double() * code)
    return torch.stack(columns, 1)


def output_error(weight: Tensor, approximation: Tensor, inputs: Tensor) -> float:
    """‖X (W − Ŵ)ᵀ‖² / tokens, from the outputs themselves, float64."""
    outputs = inputs.double() @ (weight.double() - approximation.double()).T
    return float(outputs.square().sum()) / inputs.shape[0]


@dataclass(frozen=True)
class Compensated:
    """A compensated rounding: codes and parameters in the weight's own order, and how near to a tie it came."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    margin: float


def compensated_rounding(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    damping: float = 0.01,
    act_order: bool = False,
) -> Compensated:
    """GPTQ without its recursion: before each rounding, the columns left are set to their least-squares optimum.

    With the columns of S rounded, and Δ_S the change that this made to the original weights, tr(Δ H Δᵀ) is least at
    Δ_R = −Δ_S H_SR H_RR⁻¹ for the columns of R that are left. One linear system a step.

    Args:
        weight: `[rows, in]`, float64.
        hessian: `[in, in]`, float64; features with H_ii = 0 are dead and their weights 0.
        bits: of a code.
        group_size: columns that share a scale, fixed when its first column is up.
        symmetric: without a zero point.
        damping: share of the mean diagonal of features that live.
        act_order: in the order of falling diagonal.

    Returns:
        The codes; `margin` is the smallest distance of any number from a tie, in steps.
    """
    rows, columns = weight.shape
    diagonal = hessian.diagonal()
    alive = diagonal > 0
    mean = diagonal[alive].mean()
    damped = hessian + torch.diag(torch.where(alive, damping * mean, mean))
    original = weight * alive
    order = sorted(range(columns), key=lambda j: -float(diagonal[j])) if act_order else list(range(columns))
    change = torch.zeros_like(original)
    codes = torch.zeros(rows, columns, dtype=torch.int64)
    params: dict[int, tuple[Tensor, Tensor | None]] = {}
    margin = 0.5
    for step, column in enumerate(order):
        done, left = order[:step], order[step:]
        present = original.clone()
        if done:
            pull = torch.linalg.solve(damped[left][:, left], damped[left][:, done] @ change[:, done].T).T
            present[:, left] = original[:, left] - pull
        group = column // group_size
        if group not in params:
            params[group] = nearest_params(present[:, group * group_size : (group + 1) * group_size], bits, symmetric)
        scale, zero = params[group]
        value = present[:, column : column + 1]
        code = nearest_codes(value, scale, zero, bits).double()
        fraction = (value / scale).remainder(1)
        margin = min(margin, float((fraction - 0.5).abs().min()))
        codes[:, column] = code[:, 0].long()
        change[:, column] = (scale * (code if zero is None else code - zero))[:, 0] - original[:, column]
    groups = [params[group] for group in range(len(params))]
    zeros = [zero for _, zero in groups if zero is not None]
    return Compensated(
        codes, torch.cat([scale for scale, _ in groups], 1), torch.cat(zeros, 1) if zeros else None, margin
    )


def scaling_errors(
    weights: Sequence[Tensor], inputs: Tensor, bits: int, group_size: int, grid: int, symmetric: bool = True
) -> tuple[list[Tensor], list[float]]:
    """AWQ's candidates salience^(i/grid) and the output error of each, in float64.

    Args:
        weights: each `[out, in]`, float64.
        inputs: `[tokens, in]`, float64.
        bits: of a code.
        group_size: columns that share a scale.
        grid: steps.
        symmetric: without a zero point.

    Returns:
        Scales `[in]` and errors, one for each of the grid + 1 exponents.
    """
    mean = inputs.abs().sum(0) / inputs.shape[0]
    share = torch.maximum(mean / mean.max(), torch.tensor(1e-4, dtype=torch.float64))
    candidates, errors = [], []
    for step in range(grid + 1):
        scales = torch.exp(share.log() * step / grid)
        scales = scales / torch.exp((scales.max().log() + scales.min().log()) / 2)
        rounded = [round_to_nearest(weight * scales, bits, group_size, symmetric) / scales for weight in weights]
        pairs = zip(weights, rounded, strict=True)
        candidates.append(scales)
        errors.append(sum(output_error(weight, other, inputs) for weight, other in pairs))
    return candidates, errors


def correlated_inputs(tokens: int, features: int, seed: int, sources: int = 6, noise: float = 0.3) -> Tensor:
    """Activations whose features share a few sources and differ in size, as those of a model do; float64.

    Args:
        tokens: rows.
        features: columns.
        seed: of the generator.
        sources: what the features have in common.
        noise: what each has for itself.
    """
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(tokens, sources, generator=generator, dtype=torch.float64)
    mixing = torch.randn(sources, features, generator=generator, dtype=torch.float64)
    own = torch.randn(tokens, features, generator=generator, dtype=torch.float64)
    size = torch.exp(0.5 * torch.randn(features, generator=generator, dtype=torch.float64))
    return (common @ mixing + noise * own) * size


def gaussian_weight(rows: int, features: int, seed: int) -> Tensor:
    """A weight with some rows larger than others; float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    return weight * torch.linspace(0.5, 2, rows, dtype=torch.float64)[:, None]
