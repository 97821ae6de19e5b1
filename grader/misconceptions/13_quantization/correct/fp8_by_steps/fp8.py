"""FP8 without bits: each number is a whole multiple of the step of its power of two, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.float_formats import Fp8Tensor

# Name: mantissa bits, exponent of the smallest normal number, largest number, code beyond it.
FORMATS = {"e4m3": (3, -6, 448.0, 0x7F), "e5m2": (2, -14, 57344.0, 0x7C)}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def decode_fp8(codes: Tensor, format: str) -> Tensor:
    """Field by field, for all codes at once."""
    mantissa_bits, lowest, largest, beyond = _facts(format)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes are {codes.dtype}, not uint8")
    wide = codes.double()
    sign = 1 - 2 * (wide >= 128).double()
    exponent = ((wide % 128) / 2**mantissa_bits).floor()
    fraction = (wide % 128) / 2**mantissa_bits - exponent
    powers = torch.tensor([2.0**e for e in range(lowest, lowest + 32)], dtype=torch.float64)
    normal = (1 + fraction) * powers[(exponent - 1).clamp(min=0).long()]
    value = torch.where(exponent == 0, fraction * powers[0], normal)
    if format == "e5m2":
        value[wide % 128 == beyond] = math.inf
        value[wide % 128 > beyond] = math.nan
    else:
        value[value > largest] = math.nan
    return (sign * value).float()


def encode_fp8(x: Tensor, format: str, *, saturate: bool = True) -> Tensor:
    """Rounds to a multiple of the step, and counts the steps."""
    mantissa_bits, lowest, largest, beyond = _facts(format)
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}, which would be rounded twice or not at all")
    magnitude = x.double().abs().nan_to_num(0.0, posinf=1e300)
    _, power = torch.frexp(magnitude)  # magnitude = m · 2^power with m in [1/2, 1)
    power = torch.where(magnitude > 0, power.double() - 1, lowest).clamp(lowest, 30)
    step = 2.0 ** (power - mantissa_bits)
    multiple = (magnitude / step).round()
    code = (power - lowest) * 2**mantissa_bits + multiple
    code = torch.where(multiple * step > largest, beyond - 1 if saturate else beyond, code)
    code = code + 128 * x.signbit()
    # Where E4M3 has nothing but NaN for an overflow, it may carry a sign: NaN of either sign means the same.
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def quantize_fp8(x: Tensor, format: str = "e4m3", granularity: str = "tensor", block_size: int = 128) -> Fp8Tensor:
    """Block by block."""
    largest = _facts(format)[2]
    if x.dtype not in DTYPES or x.dim() != 2 or not x.numel():
        raise ValueError(f"x is {x.dtype} of shape {list(x.shape)}")
    for row, column in (~x.isfinite()).nonzero().tolist():
        raise ValueError(f"x is not finite at [{row}, {column}]")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}")
    rows, columns = x.shape
    if granularity == "tensor":
        height, width = rows, columns
    elif granularity == "channel":
        height, width = 1, columns
    elif granularity == "block":
        height = width = block_size
    else:
        raise ValueError(f"granularity {granularity}")
    codes, scales = torch.empty(rows, columns, dtype=torch.uint8), []
    for top in range(0, rows, height):
        scales.append([])
        for left in range(0, columns, width):
            part = x[top : top + height, left : left + width].float()
            absmax = float(part.abs().max())
            scale = max(absmax / largest, 2.0**-126) if absmax else 1.0
            scales[-1].append(scale)
            codes[top : top + height, left : left + width] = encode_fp8(part / scale, format)
    return Fp8Tensor(codes, torch.tensor(scales), format, height, width)


def dequantize_fp8(q: Fp8Tensor) -> Tensor:
    """Looks up each value's scale."""
    rows, columns = (torch.arange(size) for size in q.codes.shape)
    return decode_fp8(q.codes, q.format) * q.scale[(rows // q.block_rows)[:, None], columns // q.block_columns]


def _facts(format: str) -> tuple[int, int, float, int]:
    if format not in FORMATS:
        raise ValueError(f"no format {format}")
    return FORMATS[format]
