"""Task 12: FP4 in blocks, with powers of two as scales (MXFP4), or with small floats under a tensor's scale (NVFP4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.float_formats import MX_BLOCK, NV_BLOCK, Mxfp4Tensor, Nvfp4Tensor
from labkit.quantization_checks import check_matrix

from .fp4 import decode_fp4, encode_fp4
from .fp8 import decode_fp8, encode_fp8

EncodeFp8 = Callable[[Tensor, str], Tensor]
DecodeFp8 = Callable[[Tensor, str], Tensor]

LARGEST_FP4, LARGEST_E4M3 = 6.0, 448.0

SMALLEST_E4M3 = 2.0**-9
"""The smallest positive number of E4M3: a block scale below would round to 0, or lose its block to it."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The smallest normal float32."""


def decode_e8m0(codes: Tensor) -> Tensor:
    """The powers of two that scale codes of MXFP4 stand for: all 8 bits are exponent, with bias 127.

    Args:
        codes: uint8, of any shape. 0 is 2^-127, 254 is 2^127, and 255 is NaN.

    Returns:
        float32, of the same shape.

    Raises:
        ValueError: codes that aren't uint8.

    Source: OCP Microscaling Formats v1.0, section 5.4.1.
    """
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
    # BEGIN SOLUTION
    # A float32 has the same exponent bits. Its exponent 0 is for subnormals, of which 2^-127 has the highest bit.
    bits = torch.where(codes == 0, 1 << 22, codes.to(torch.int32) << 23)
    return torch.where(codes == 255, torch.nan, bits.view(torch.float32))
    # END SOLUTION


def quantize_mxfp4(x: Tensor) -> Mxfp4Tensor:
    """A matrix in MXFP4. Blocks of 32 begin anew in each row; the last one of a row may be shorter.

    The exponent of a block's scale is floor(log2 max|x|) - 2, since 4 = 2^2 is the highest power of two in FP4. So the
    largest value lands in [4, 8), and what is beyond 6 there becomes 6. (Another rule rounds log2(max|x| / 6) *up*:
    nothing is cut off then, but more blocks leave the upper half of the grid idle. OCP's rule is the first.)

    Args:
        x: finite, floating point `[rows, columns]`, not empty; it is worked on in float32.

    Returns:
        Scale codes from 0 to 254: exponents are cut off at -127 below, and NaN is never written. A block of zeros has
        a scale like any other, and codes 0.

    Raises:
        ValueError: no such matrix, or a number too large for float32.

    Source: OCP Microscaling Formats v1.0, section 6.3; 2310.10537, algorithm 1.
    """
    check_matrix("x", x)
    check_matrix("x in float32", x.float())
    # BEGIN SOLUTION
    blocks = _blocks(x, MX_BLOCK)
    absmax = blocks.abs().amax(2)
    # The exponent bits are floor(log2 absmax) + 127 exactly; a computed logarithm may round up to the next power.
    scale_codes = ((absmax.view(torch.int32) >> 23) - 2).clamp(min=0).to(torch.uint8)
    codes = encode_fp4(blocks / decode_e8m0(scale_codes)[:, :, None])
    return Mxfp4Tensor(codes.flatten(1)[:, : x.shape[1]].contiguous(), scale_codes)
    # END SOLUTION


def dequantize_mxfp4(q: Mxfp4Tensor) -> Tensor:
    """The matrix that a quantized one stands for.

    Returns:
        float32, `[rows, columns]`; NaN throughout a block whose scale is NaN.
    """
    # BEGIN SOLUTION
    return decode_fp4(q.codes) * _spread(decode_e8m0(q.scale_codes), MX_BLOCK, q.codes.shape[1])
    # END SOLUTION


def quantize_nvfp4(x: Tensor, *, encode_fp8: EncodeFp8 = encode_fp8, decode_fp8: DecodeFp8 = decode_fp8) -> Nvfp4Tensor:
    """A matrix in NVFP4. Blocks of 16 begin anew in each row; the last one of a row may be shorter.

    The tensor's scale is max|x| / (6 · 448): it gives the block with the largest value the largest scale that E4M3 has.
    A block's own scale is max|x| / 6 in units of it, rounded to E4M3, but at least 2^-9, its smallest positive number.
    Values are divided by the scale *as it was rounded*.

    Args:
        x: finite, floating point `[rows, columns]`, not empty; it is worked on in float32.
        encode_fp8: task 8's function, called with the wanted scales and "e4m3".
        decode_fp8: task 8's function, called with codes and "e4m3".

    Returns:
        The tensor's scale is at least `SMALLEST_SCALE`, and so positive for a matrix of zeros, too.

    Raises:
        ValueError: no such matrix, or a number too large for float32.

    Source: module section 4.3.
    """
    check_matrix("x", x)
    check_matrix("x in float32", x.float())
    # BEGIN SOLUTION
    blocks = _blocks(x, NV_BLOCK)
    absmax = blocks.abs().amax(2)
    tensor_scale = (absmax.amax() / (LARGEST_FP4 * LARGEST_E4M3)).clamp(min=SMALLEST_SCALE)
    scale_codes = encode_fp8((absmax / LARGEST_FP4 / tensor_scale).clamp(min=SMALLEST_E4M3), "e4m3")
    scale = decode_fp8(scale_codes, "e4m3") * tensor_scale
    codes = encode_fp4(blocks / scale[:, :, None])
    return Nvfp4Tensor(codes.flatten(1)[:, : x.shape[1]].contiguous(), scale_codes, tensor_scale)
    # END SOLUTION


def dequantize_nvfp4(q: Nvfp4Tensor, *, decode_fp8: DecodeFp8 = decode_fp8) -> Tensor:
    """The matrix that a quantized one stands for.

    Args:
        q: from `quantize_nvfp4`.
        decode_fp8: task 8's function, called with codes and "e4m3".

    Returns:
        float32, `[rows, columns]`.
    """
    # BEGIN SOLUTION
    scale = decode_fp8(q.scale_codes, "e4m3") * q.tensor_scale
    return decode_fp4(q.codes) * _spread(scale, NV_BLOCK, q.codes.shape[1])
    # END SOLUTION


# BEGIN SOLUTION
def _blocks(x: Tensor, size: int) -> Tensor:
    """The rows in blocks, `[rows, blocks, size]` in float32, the last of each row filled up with zeros."""
    return torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def _spread(scale: Tensor, size: int, columns: int) -> Tensor:
    """Each block's scale at each of its columns."""
    return scale.repeat_interleave(size, 1)[:, :columns]


# END SOLUTION
