"""MXFP4 and NVFP4 block by block, with scales as Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from labkit.float_formats import Mxfp4Tensor, Nvfp4Tensor

from .fp4 import decode_fp4, encode_fp4
from .fp8 import decode_fp8 as own_decode
from .fp8 import encode_fp8 as own_encode


def decode_e8m0(codes: Tensor) -> Tensor:
    """A table of 256."""
    if codes.dtype != torch.uint8:
        raise ValueError("codes of E8M0 are uint8")
    table = torch.tensor([math.ldexp(1.0, code - 127) for code in range(255)] + [math.nan], dtype=torch.float64)
    return table.float()[codes.long()]


def quantize_mxfp4(x: Tensor) -> Mxfp4Tensor:
    """The exponent by frexp, which is exact."""
    values = _checked(x)
    codes, scale_codes = torch.zeros(x.shape, dtype=torch.uint8), []
    for row in range(len(x)):
        scale_codes.append([])
        for start in range(0, x.shape[1], 32):
            block = values[row, start : start + 32]
            # frexp's mantissa is in [1/2, 1), so its exponent is one more than that of the power below.
            _, power = math.frexp(float(block.abs().max()))
            exponent = max(power - 3, -127)
            scale_codes[-1].append(exponent + 127)
            codes[row, start : start + 32] = encode_fp4(block * 2.0**-exponent)
    return Mxfp4Tensor(codes, torch.tensor(scale_codes, dtype=torch.uint8))


def dequantize_mxfp4(q: Mxfp4Tensor) -> Tensor:
    """Looks up each column's scale."""
    return decode_fp4(q.codes) * decode_e8m0(q.scale_codes)[:, torch.arange(q.codes.shape[1]) // 32]


def quantize_nvfp4(x: Tensor, *, encode_fp8: Callable = own_encode, decode_fp8: Callable = own_decode) -> Nvfp4Tensor:
    """All scales first, encoded at once; a block of zeros takes the scale 1."""
    values = _checked(x)
    columns = x.shape[1]
    largest = torch.stack([block.abs().amax(1) for block in values.split(16, 1)], 1)
    tensor_scale = torch.tensor(max(float(largest.max()) / 2688, 2.0**-126), dtype=torch.float32)
    wanted = largest / (6 * tensor_scale.double())
    wanted = torch.where(largest > 0, wanted.clamp(2.0**-9, 448.0), 1.0)
    scale_codes = encode_fp8(wanted.float(), "e4m3")
    scale = decode_fp8(scale_codes, "e4m3").double() * tensor_scale
    return Nvfp4Tensor(encode_fp4(values / scale[:, torch.arange(columns) // 16]), scale_codes, tensor_scale)


def dequantize_nvfp4(q: Nvfp4Tensor, *, decode_fp8: Callable = own_decode) -> Tensor:
    """Scales the numbers by the block's scale first, then by the tensor's."""
    columns = torch.arange(q.codes.shape[1])
    return decode_fp4(q.codes) * decode_fp8(q.scale_codes, "e4m3")[:, columns // 16] * q.tensor_scale


def _checked(x: Tensor) -> Tensor:
    if x.dim() != 2 or not x.numel() or not x.is_floating_point():
        raise ValueError(f"no matrix of floating numbers: {x.dtype} {list(x.shape)}")
    for place in (~x.float().isfinite()).nonzero().tolist():
        raise ValueError(f"not finite at {place}")
    return x.float().double()
