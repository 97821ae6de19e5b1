"""Task 8: floats of 8 bits, by arithmetic on bits, and the scales that bring a matrix into their range."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.float_formats import Fp8Tensor
from labkit.quantization_checks import check_matrix


@dataclass(frozen=True)
class Float8:
    """How the 7 bits behind the sign are used.

    Args:
        mantissa_bits: the low bits; the exponent has the others.
        bias: what is subtracted from the exponent's bits; 0 in them means a subnormal number.
        largest: the largest finite number.
        largest_code: its code.
        infinity: its code; None if the format has none.
        nan: the code that NaN is written as, without a sign.
    """

    mantissa_bits: int
    bias: int
    largest: float
    largest_code: int
    infinity: int | None
    nan: int


FORMATS = {
    # The highest exponent holds ordinary numbers, too: only 0x7F and 0xFF are NaN, and nothing is infinite.
    "e4m3": Float8(mantissa_bits=3, bias=7, largest=448.0, largest_code=0x7E, infinity=None, nan=0x7F),
    # As in IEEE 754: the highest exponent holds infinity (mantissa 0) and NaN (any other).
    "e5m2": Float8(mantissa_bits=2, bias=15, largest=57344.0, largest_code=0x7B, infinity=0x7C, nan=0x7F),
}

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The smallest normal float32: below it a scale would have lost digits, or be 0."""


def decode_fp8(codes: Tensor, format: str) -> Tensor:
    """The numbers that codes of 8 bits stand for, NaN and infinity included.

    Args:
        codes: uint8, of any shape.
        format: "e4m3" or "e5m2".

    Returns:
        float32, of the same shape; code 0x80 is -0.

    Raises:
        ValueError: another dtype or format.

    Source: FP8 formats (2209.05433); module section 4.3.
    """
    kind = _format(format)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}; reinterpret other bytes by codes.view(torch.uint8)")
    # BEGIN SOLUTION
    table = torch.tensor([_number(code, kind) for code in range(256)], device=codes.device)
    return table[codes.int()]
    # END SOLUTION


def encode_fp8(x: Tensor, format: str, *, saturate: bool = True) -> Tensor:
    """The codes of the nearest numbers; of two equally near ones the one whose code is even.

    Args:
        x: float32, float16 or bfloat16, of any shape. (A float64 would be rounded twice on the way: round it yourself.)
        format: "e4m3" or "e5m2".
        saturate: what is too large becomes the largest finite number, infinity included. Otherwise what *rounds*
            beyond that number becomes infinity where the format has one, and NaN where it has none.

    Returns:
        uint8, of the same shape, the sign kept, also that of 0 and of what rounds to it. NaN is 0x7F in every case.

    Raises:
        ValueError: another dtype or format.

    Source: FP8 formats (2209.05433); OCP 8-bit Floating Point Specification v1.0.
    """
    kind = _format(format)
    _check_dtype(x)
    # BEGIN SOLUTION
    bits = x.float().contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    code = _rounded(magnitude, kind)
    overflow = kind.largest_code if saturate else kind.nan if kind.infinity is None else kind.infinity
    code = torch.where(code > kind.largest_code, overflow, code)
    code = code | (bits >> 24) & 0x80
    return torch.where(x.isnan(), kind.nan, code).to(torch.uint8)
    # END SOLUTION


def quantize_fp8(x: Tensor, format: str = "e4m3", granularity: str = "tensor", block_size: int = 128) -> Fp8Tensor:
    """A matrix in FP8, with scales that map the largest magnitude of each part to the largest number of the format.

    Args:
        x: float32, float16 or bfloat16, `[rows, columns]`, neither of them 0.
        format: "e4m3" for weights and activations, "e5m2" where range matters more than digits.
        granularity: what shares a scale: "tensor" everything; "channel" a row, which is an output channel of a weight
            and a token of an activation; "block" a square of `block_size` rows and columns, less at the edges.
        block_size: for "block", at least 1.

    Returns:
        scale = max|x| / largest number, in float32, at least `SMALLEST_SCALE`, and 1 where all is 0.

    Raises:
        ValueError: another dtype, shape, format, granularity or size, or a value that is not finite.

    Source: module section 4.3.
    """
    kind = _format(format)
    _check_dtype(x)
    check_matrix("x", x)
    check_count("block_size", block_size, 1)
    rows, columns = x.shape
    shapes = {"tensor": (rows, columns), "channel": (1, columns), "block": (block_size, block_size)}
    if granularity not in shapes:
        raise ValueError(f"granularity must be one of {', '.join(shapes)}, got {granularity!r}")
    # BEGIN SOLUTION
    block_rows, block_columns = shapes[granularity]
    values = x.float()
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % block_columns, 0, -rows % block_rows))
    absmax = padded.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows)).amax((1, 3))
    scale = torch.where(absmax > 0, (absmax / kind.largest).clamp(min=SMALLEST_SCALE), 1.0)
    codes = encode_fp8(values / _spread(scale, block_rows, block_columns, rows, columns), format)
    return Fp8Tensor(codes, scale, format, block_rows, block_columns)
    # END SOLUTION


def dequantize_fp8(q: Fp8Tensor) -> Tensor:
    """The values that the codes stand for under their scales.

    Returns:
        float32, `[rows, columns]`.
    """
    # BEGIN SOLUTION
    rows, columns = q.codes.shape
    return decode_fp8(q.codes, q.format) * _spread(q.scale, q.block_rows, q.block_columns, rows, columns)
    # END SOLUTION


def _format(name: str) -> Float8:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def _check_dtype(x: Tensor) -> None:
    """Refuse numbers that float32 can't hold as they are."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}; convert it first")


# BEGIN SOLUTION
def _number(code: int, kind: Float8) -> float:
    """What one code stands for."""
    sign = -1.0 if code & 0x80 else 1.0
    code &= 0x7F
    if kind.infinity is not None and code >= kind.infinity:
        return sign * math.inf if code == kind.infinity else math.nan
    if kind.infinity is None and code == kind.nan:
        return math.nan
    one = 1 << kind.mantissa_bits
    exponent, mantissa = divmod(code, one)
    if exponent == 0:  # subnormal: no leading 1, and the exponent of the smallest normal numbers
        return sign * math.ldexp(mantissa, 1 - kind.bias - kind.mantissa_bits)
    return sign * math.ldexp(one + mantissa, exponent - kind.bias - kind.mantissa_bits)


def _rounded(magnitude: Tensor, kind: Float8) -> Tensor:
    """Codes without sign of float32 bits without sign; larger than any code where the number is too large."""
    exponent = (magnitude >> 23) - 127 + kind.bias
    significand = (magnitude & 0x7FFFFF) | 0x800000
    # Bits to drop: those that the mantissa is too short for, and one more for each step below the normal numbers.
    # From 25 on nothing is left to round up; a float32's own subnormals have no leading 1, but end here as well.
    shift = (23 - kind.mantissa_bits + (1 - exponent).clamp(min=0)).clamp(max=25)
    odd = (significand >> shift) & 1
    kept = (significand + (1 << (shift - 1)) - 1 + odd) >> shift
    # The leading 1 of a normal number adds 1 to the exponent's bits, and so does a mantissa that rounds up to 2.
    return ((exponent.clamp(min=1) - 1) << kind.mantissa_bits) + kept


def _spread(scale: Tensor, block_rows: int, block_columns: int, rows: int, columns: int) -> Tensor:
    """Each block's scale at each of its values: `[rows, columns]`, or a shape that broadcasts to it."""
    wide = scale.repeat_interleave(block_columns, 1)[:, :columns] if scale.shape[1] > 1 else scale
    return wide.repeat_interleave(block_rows, 0)[:rows] if scale.shape[0] > 1 else wide


# END SOLUTION
