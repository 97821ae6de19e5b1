"""Every granularity as a reshape: rows are padded with zeros, which change no range, and each block becomes a row."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from labkit.quantization_checks import check_bits, check_finite, check_matrix, check_quantized, check_scale
from labkit.quantized import QuantizedTensor


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    """2^b codes from the lowest on."""
    check_bits(bits)
    low = -(1 << bits >> 1) if symmetric else 0
    return low, low + (1 << bits) - 1


def group_params(values: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    """In float64, cast at the end."""
    check_matrix("values", values)
    low, high = code_range(bits, symmetric)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    with_zero = torch.cat((values.double(), torch.zeros(len(values), 1, dtype=torch.float64)), dim=1)
    smallest, largest = with_zero.aminmax(dim=1, keepdim=True)
    reach = torch.maximum(largest, -smallest) if symmetric else largest * 0.5 - smallest * 0.5
    scale = (reach / high * (1 if symmetric else 2)).to(dtype)
    scale[scale < torch.finfo(dtype).tiny] = 1
    if symmetric:
        return scale, None
    return scale, torch.round(smallest / -scale.double()).clamp(low, high).to(_dtype(bits, symmetric))


def to_codes(x: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> Tensor:
    """In float64, number by number against whole tensors of scales and zero points."""
    low, high = code_range(bits, zero_point is None)
    check_finite("x", x)
    check_scale("scale", scale)
    zeros = torch.zeros_like(scale) if zero_point is None else zero_point.double()
    if zeros.shape != scale.shape or bool((zeros < low).any()) or bool((zeros > high).any()):
        raise ValueError(f"zero_point must be codes from {low} to {high} in the shape of scale")
    if scale.dim() > x.dim() or any(a not in (1, b) for a, b in zip(scale.shape[::-1], x.shape[::-1], strict=False)):
        raise ValueError(f"scale {list(scale.shape)} can't be shared by x {list(x.shape)}")
    steps = torch.round(x.double() / scale.double()) + zeros
    return torch.minimum(torch.maximum(steps, steps.new_tensor(low)), steps.new_tensor(high)).to(
        _dtype(bits, zero_point is None)
    )


def from_codes(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """In float64, held within the dtype's range."""
    check_scale("scale", scale)
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError("zero_point must have the shape of scale")
    steps = codes.double() - (0 if zero_point is None else zero_point.double())
    values = steps * scale.double()
    if values.shape != codes.shape:
        raise ValueError(f"scale {list(scale.shape)} can't be shared by codes {list(codes.shape)}")
    limits = torch.finfo(scale.dtype)
    return values.clamp(limits.min, limits.max).to(scale.dtype)


def quantize(
    x: Tensor, bits: int, *, symmetric: bool = True, granularity: str = "group", group_size: int | None = None
) -> QuantizedTensor:
    """Blocks as rows, quantized all at once, and put back."""
    check_matrix("x", x)
    check_bits(bits)
    if (granularity == "group") != (group_size is not None):
        raise ValueError(f"group_size is for granularity 'group' and needed there, got {granularity} and {group_size}")
    if granularity == "group" and (type(group_size) is not int or group_size < 1):
        raise ValueError(f"group_size must be a whole number from 1 up, got {group_size!r}")
    rows, columns = x.shape
    sizes = {"tensor": columns, "channel": columns, "token": columns, "input_channel": 1, "group": group_size}
    if granularity not in sizes:
        raise ValueError(f"there is no granularity {granularity!r}, only {', '.join(sizes)}")
    size = sizes[granularity]
    groups = -(-columns // size)
    padded = torch.zeros(rows, groups * size, dtype=x.dtype)
    padded[:, :columns] = x
    blocks = padded.reshape(rows, groups, size)
    shared = granularity in ("tensor", "input_channel")
    grouped = blocks.transpose(0, 1).reshape(groups, rows * size) if shared else blocks.reshape(rows * groups, size)
    scale, zeros = group_params(grouped, bits, symmetric)
    codes = to_codes(grouped, scale, zeros, bits)
    codes = codes.reshape(groups, rows, size).transpose(0, 1) if shared else codes.reshape(rows, groups, size)
    form = (1, groups) if shared else (rows, groups)
    return QuantizedTensor(
        codes.reshape(rows, groups * size)[:, :columns].clone(),
        scale.reshape(form),
        None if zeros is None else zeros.reshape(form),
        bits,
        size,
    )


def dequantize(q: QuantizedTensor) -> Tensor:
    """Looks the group of each column up."""
    check_quantized("q", q)
    group = torch.div(torch.arange(q.codes.shape[1]), q.group_size, rounding_mode="floor")
    return from_codes(q.codes, q.scale[:, group], None if q.zero_point is None else q.zero_point[:, group])


def rounding_mse(scale: Tensor) -> Tensor:
    """The variance of a uniform number on a stretch of length scale."""
    check_scale("scale", scale)
    return (scale / 2) ** 2 / 3


def bits_per_weight(bits: int, group_size: int, scale_bits: int = 16, zero_point_bits: int = 0) -> float:
    """All bits of a group, divided by its weights."""
    check_bits(bits)
    if any(type(n) is not int or n < 0 for n in (group_size, scale_bits, zero_point_bits)) or group_size == 0:
        raise ValueError("group_size must be at least 1, the bits of scale and zero point at least 0")
    return float(Fraction(bits * group_size + scale_bits + zero_point_bits, group_size))


def weight_bytes(num_weights: int, bits_per_weight: float) -> int:
    """In exact fractions."""
    if type(num_weights) is not int or num_weights < 0 or not 0 < bits_per_weight < float("inf"):
        raise ValueError(f"no memory for {num_weights!r} weights of {bits_per_weight!r} bits")
    bits = num_weights * Fraction(bits_per_weight)
    return -(-bits.numerator // (8 * bits.denominator))


def _dtype(bits: int, symmetric: bool) -> torch.dtype:
    return torch.int16 if bits == 8 and not symmetric else torch.int8
