"""Task 1: real numbers as integers that share a scale, and what that costs in accuracy and in bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import (
    check_bits,
    check_finite,
    check_integers,
    check_matrix,
    check_quantized,
    check_scale,
)
from labkit.quantized import QuantizedTensor

GRANULARITIES = ("tensor", "channel", "token", "input_channel", "group")
"""Who shares a scale: all numbers, a row of a weight, a row of activations, a column, neighbours within a row."""


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    """The smallest and the largest code.

    Args:
        bits: of a code, 2 to 8.
        symmetric: signed codes around 0; else unsigned ones with a zero point.

    Returns:
        Both ends, allowed themselves.

    Raises:
        ValueError: another number of bits.
    """
    check_bits(bits)
    # BEGIN SOLUTION
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    # END SOLUTION


def group_params(values: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point for one group of each row, from the numbers in it.

    Symmetric: the largest magnitude becomes the largest code. With a zero point: the range from the smallest to the
    largest number, stretched to include 0, is spread over all codes, and 0 itself gets a code.

    Args:
        values: the group's numbers in every row, floating point `[rows, n]`.
        bits: of a code, 2 to 8.
        symmetric: without a zero point.

    Returns:
        scale: positive, `[rows, 1]`, float64 for float64 values, else float32. 1 for a group of zeros, and for one
            so small that its scale would be below the smallest normal number.
        zero_point: the code of the value 0, integers `[rows, 1]` of the codes' dtype; None if symmetric.

    Raises:
        ValueError: values that are no matrix of finite numbers, or another number of bits.

    Source: module section 4.1.
    """
    check_matrix("values", values)
    low, high = code_range(bits, symmetric)
    # BEGIN SOLUTION
    wide = values.to(_arithmetic(values))
    if symmetric:
        return _usable(wide.abs().amax(1, keepdim=True) / high), None
    smallest, largest = wide.amin(1, keepdim=True).clamp(max=0), wide.amax(1, keepdim=True).clamp(min=0)
    # Each end by itself: the difference of two huge numbers may overflow.
    scale = _usable(largest / high - smallest / high)
    return scale, (-smallest / scale).round().clamp(low, high).to(_code_dtype(high))
    # END SOLUTION


def to_codes(x: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> Tensor:
    """The code of each number: clamp(round(x / scale) + zero_point), halves to the even integer.

    Args:
        x: floating point, of any shape.
        scale: positive, broadcasts to x.
        zero_point: integers of scale's shape, from 0 up; None for signed codes around 0.
        bits: of a code, 2 to 8.

    Returns:
        Integers of x's shape: int8 where all codes of so many bits fit, else int16 (8 bits with a zero point).

    Raises:
        ValueError: a number that isn't finite, a scale that isn't positive or doesn't broadcast, a zero point that
            is no code or of another shape, or another number of bits.

    Source: module section 4.1.
    """
    low, high = code_range(bits, zero_point is None)
    check_finite("x", x)
    _check_shared(x.shape, scale, zero_point, high)
    # BEGIN SOLUTION
    codes = (x.to(_arithmetic(x)) / scale).round()
    if zero_point is not None:
        codes = codes + zero_point
    # Clamped before the cast, which would wrap around.
    return codes.clamp(low, high).to(_code_dtype(high))
    # END SOLUTION


def from_codes(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """The number that each code stands for: scale · (code − zero_point).

    Args:
        codes: integers of any shape.
        scale: positive, broadcasts to codes.
        zero_point: integers of scale's shape; None stands for 0.

    Returns:
        Floating point of codes' shape and scale's dtype, computed in at least float32 and rounded once. What rounding
        pushes beyond the range of that dtype is the largest number it has, not infinity.

    Raises:
        ValueError: a scale that isn't positive or doesn't broadcast, or a zero point of another shape.
    """
    _check_shared(codes.shape, scale, zero_point, None)
    # BEGIN SOLUTION
    steps = codes.to(_arithmetic(scale))
    if zero_point is not None:
        steps = steps - zero_point
    # A number at the end of the dtype's range may have been rounded beyond it.
    limit = torch.finfo(scale.dtype).max
    return (steps * scale).clamp(-limit, limit).to(scale.dtype)
    # END SOLUTION


def quantize(
    x: Tensor, bits: int, *, symmetric: bool = True, granularity: str = "group", group_size: int | None = None
) -> QuantizedTensor:
    """A matrix in integers.

    Args:
        x: floating point `[rows, columns]`: a weight `[out, in]`, or activations `[tokens, features]`.
        bits: of a code, 2 to 8.
        symmetric: signed codes without a zero point.
        granularity: who shares a scale: "tensor" all numbers; "channel" a row of a weight; "token" a row of
            activations; "input_channel" a column; "group" `group_size` neighbours within a row, the last group of
            a row being shorter where the size does not divide it.
        group_size: at least 1; for "group", and for no other.

    Returns:
        The form that `QuantizedTensor` describes.

    Raises:
        ValueError: x is no matrix of finite numbers, another number of bits, an unknown granularity, or a group size
            that is missing, too small or not wanted.

    Source: module section 4.1.
    """
    check_matrix("x", x)
    check_bits(bits)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if granularity == "group":
        if group_size is None:
            raise ValueError("granularity 'group' needs a group_size; 'channel' gives each row one scale")
        check_count("group_size", group_size, 1)
    elif group_size is not None:
        raise ValueError(f"granularity {granularity!r} takes no group_size, got {group_size!r}")
    # BEGIN SOLUTION
    columns = x.shape[1]
    if granularity == "tensor":
        size, params = columns, [group_params(x.reshape(1, -1), bits, symmetric)]
    elif granularity == "input_channel":
        size, (scale, zero) = 1, group_params(x.T, bits, symmetric)
        params = [(scale.T, None if zero is None else zero.T)]
    else:
        size = group_size or columns
        params = [group_params(group, bits, symmetric) for group in x.split(size, dim=1)]
    scale = torch.cat([scale for scale, _ in params], dim=1).contiguous()
    zeros = [zero for _, zero in params if zero is not None]
    zero_point = torch.cat(zeros, dim=1).contiguous() if zeros else None
    codes = to_codes(x, *_by_column(scale, zero_point, size, columns), bits)
    return QuantizedTensor(codes, scale, zero_point, bits, size)
    # END SOLUTION


def dequantize(q: QuantizedTensor) -> Tensor:
    """The matrix that a quantized one stands for.

    Args:
        q: of any granularity.

    Returns:
        Floating point `[rows, columns]`, of the scale's dtype.

    Raises:
        ValueError: codes, scale and zero point that don't belong together, or codes that need more bits.
    """
    check_quantized("q", q)
    # BEGIN SOLUTION
    return from_codes(q.codes, *_by_column(q.scale, q.zero_point, q.group_size, q.codes.shape[1]))
    # END SOLUTION


def rounding_mse(scale: Tensor) -> Tensor:
    """The mean squared error of rounding to multiples of a scale, for numbers spread over many steps.

    Args:
        scale: positive, of any shape.

    Returns:
        scale² / 12, of the same shape and dtype.

    Raises:
        ValueError: a scale that isn't positive and finite.

    Source: module section 4.1.
    """
    check_scale("scale", scale)
    # BEGIN SOLUTION
    return scale.square() / 12
    # END SOLUTION


def bits_per_weight(bits: int, group_size: int, scale_bits: int = 16, zero_point_bits: int = 0) -> float:
    """The bits that a weight takes, its share of the group's scale and zero point included.

    Args:
        bits: of a code, 2 to 8.
        group_size: weights that share a scale, at least 1.
        scale_bits: of a scale, at least 0.
        zero_point_bits: of a zero point, at least 0; 0 if there is none.

    Returns:
        Bits, exact for every group size that is a power of two.

    Raises:
        ValueError: a number that isn't an int or is too small.

    Source: module section 4.1.
    """
    check_bits(bits)
    check_count("group_size", group_size, 1)
    check_count("scale_bits", scale_bits, 0)
    check_count("zero_point_bits", zero_point_bits, 0)
    # BEGIN SOLUTION
    return bits + (scale_bits + zero_point_bits) / group_size
    # END SOLUTION


def weight_bytes(num_weights: int, bits_per_weight: float) -> int:
    """The memory that weights take.

    Args:
        num_weights: at least 0.
        bits_per_weight: above 0; 16 for bfloat16.

    Returns:
        Bytes, a started byte counted as a whole one.

    Raises:
        ValueError: a number of weights that is no int of at least 0, or bits that aren't a finite number above 0.

    Source: module section 4.4.
    """
    check_count("num_weights", num_weights, 0)
    if not (math.isfinite(bits_per_weight) and bits_per_weight > 0):
        raise ValueError(f"bits_per_weight must be a finite number above 0, got {bits_per_weight!r}")
    # BEGIN SOLUTION
    return math.ceil(num_weights * bits_per_weight / 8)
    # END SOLUTION


# BEGIN SOLUTION
def _arithmetic(values: Tensor) -> torch.dtype:
    """The dtype to compute in: half precision would lose what is left of a number after its division."""
    return torch.promote_types(values.dtype, torch.float32)


def _usable(scale: Tensor) -> Tensor:
    """The scale, but 1 where it is 0 (0 / 0 is NaN) or so small that it has lost its own precision."""
    return scale.where(scale >= torch.finfo(scale.dtype).tiny, torch.ones_like(scale))


def _code_dtype(high: int) -> torch.dtype:
    return torch.int8 if high <= torch.iinfo(torch.int8).max else torch.int16


def _by_column(scale: Tensor, zero_point: Tensor | None, group_size: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of every column, `[rows or 1, columns]`; the last group may be cut short."""
    repeats = min(group_size, columns)
    spread = scale.repeat_interleave(repeats, dim=1)[:, :columns]
    if zero_point is None:
        return spread, None
    return spread, zero_point.repeat_interleave(repeats, dim=1)[:, :columns]


# END SOLUTION


def _check_shared(shape: torch.Size, scale: Tensor, zero_point: Tensor | None, high: int | None) -> None:
    """Refuse scales and zero points that can't be shared by numbers of this shape."""
    check_scale("scale", scale)
    try:
        fits = torch.broadcast_shapes(shape, scale.shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"scale must broadcast to {list(shape)}, got {list(scale.shape)}")
    if zero_point is None:
        return
    if zero_point.shape != scale.shape:
        raise ValueError(f"zero_point must have scale's shape {list(scale.shape)}, got {list(zero_point.shape)}")
    if high is not None:
        check_integers("zero_point", zero_point, 0, high)
