"""Formats that plain matrices are rounded to when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from solutions.quantization.fp8 import quantize_fp8
from solutions.quantization.methods import gguf_tensor, round_channels
from solutions.quantization.microscaling import quantize_mxfp4, quantize_nvfp4
from solutions.quantization.nf4 import quantize_nf4
from solutions.quantization.quantized_model import QuantizedLinear, Stored
from solutions.quantization.uniform import quantize

Rounding = Callable[[Tensor], QuantizedLinear]
"""Rounds the matrix of a projection, float32 `[out, in]`, to nearest."""


def _stored(round_to_nearest: Callable[[Tensor], Stored], activations: str = "float") -> Rounding:
    return lambda weight: QuantizedLinear(round_to_nearest(weight), activations)


ROUNDINGS: Mapping[str, Rounding] = {
    "int8": _stored(partial(round_channels, bits=8)),
    "w8a8": _stored(partial(round_channels, bits=8), "int8"),
    "int4": _stored(partial(quantize, bits=4, symmetric=False, group_size=32)),
    "fp8": _stored(partial(quantize_fp8, granularity="channel")),
    "nf4": _stored(quantize_nf4),
    "mxfp4": _stored(quantize_mxfp4),
    "nvfp4": _stored(quantize_nvfp4),
} | {
    kind.lower(): _stored(partial(gguf_tensor, kind=kind))
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
}
"""By name: 8 bits with a scale a row, and the same with activations in 8 bits too; 4 bits with a scale and a zero point
for 32 columns; small floats; GGUF's blocks. Methods that need calibration make checkpoints instead."""
