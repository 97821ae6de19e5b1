"""Projections of quantized layers: packed products for few tokens, dense ones with the same numbers for many.

A step of a few tokens takes as long as reading the weights does, so fewer bits are faster. A step of many tokens takes
as long as its arithmetic, and there a plain product wins on a CPU: of bfloat16 where the CPU has units for it, of
float32 elsewhere. Both ways compute with the numbers that the *packed* layer holds, its bfloat16 scales included:
prefill and decode are one model. They still round differently, packed products reading activations in bfloat16 and
dense ones in the type of `Packing.dense_dtype`, so that a low-bit model may decide near ties by how many tokens a step
happens to have; `Packing(most_tokens=0)` computes everything in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.quantized import QuantizedTensor
from solutions.quantization.fp8 import dequantize_fp8, quantize_fp8
from solutions.quantization.packed_linear import Int4Linear, Int8Linear, Int8WeightLinear, PackedLinear, pack_linear
from solutions.quantization.quantized_model import GgufTensor, QuantizedLinear, Stored

from ..models.dense import Linear, dense
from .packing import Packing
from .q4_k import split_q4_k

_ACTIVATIONS = ("float", "int8", "fp8")
_MIDDLE, _ROWS = 8, 16
"""The code whose value the packed int4 product wants, and what must divide its rows."""


class PackedProjection:
    """A layer that is packed, and for many tokens dense.

    Args:
        packed: the layer.
        packing: when it is which.
    """

    def __init__(self, packed: PackedLinear, packing: Packing) -> None:
        self.packed = packed
        self._num_packed = packing.num_packed
        self._dtype = packing.dense_dtype
        is_kept = packing.dense_copies or not self._num_packed
        self._dense = dense(packed.dequantized().to(self._dtype)) if is_kept else None

    def __call__(self, inputs: Tensor) -> Tensor:
        """`[tokens, in] -> [tokens, out]` float32."""
        if 0 < inputs.shape[0] <= self._num_packed:
            return self.packed(inputs)
        inputs = inputs.to(self._dtype)
        if self._dense is not None:
            return self._dense(inputs).to(torch.float32)
        return F.linear(inputs, self.packed.dequantized().to(self._dtype)).to(torch.float32)


def projection(layers: Sequence[QuantizedLinear], packing: Packing) -> Linear:
    """Layers that read the same inputs as one projection, whose outputs stand side by side.

    Args:
        layers: one or more.
        packing: how they run.

    Returns:
        `[tokens, in] -> [tokens, out]` in float32, without biases.

    Raises:
        ValueError: activations that are for comparing methods only.
    """
    for layer in layers:
        if layer.activations not in _ACTIVATIONS:
            allowed = ", ".join(_ACTIVATIONS)
            raise ValueError(f"activations in {layer.activations} are simulated only; the engine runs {allowed}")
    whole = _side_by_side(layers)
    packed = None if whole is None else _packed(whole)
    if packed is not None:
        # Integers are added up exactly, however many tokens there are.
        return packed if isinstance(packed, Int8Linear) else PackedProjection(packed, packing)
    if len(layers) == 1 or _are_alike_and_dense(layers):
        return _dense(layers)
    parts = [projection([layer], packing) for layer in layers]
    return lambda inputs: torch.cat([part(inputs) for part in parts], dim=-1)


def _packed(layer: QuantizedLinear) -> PackedLinear | None:
    """The packed form; None if torch has no product for it."""
    stored = layer.stored
    if isinstance(stored, QuantizedTensor) and layer.activations == "float" and stored.bits == 8:
        one_scale_a_row = stored.zero_point is None and tuple(stored.scale.shape) == (len(stored.codes), 1)
        return Int8WeightLinear(stored) if one_scale_a_row else None
    if isinstance(stored, GgufTensor) and stored.kind == "Q4_K" and len(stored.data) % _ROWS == 0:
        codes, scale, minimum = split_q4_k(stored.data)
        return Int4Linear(codes, scale, _MIDDLE * scale - minimum, sys.maxsize)
    return pack_linear(layer, sys.maxsize)


def _are_alike_and_dense(layers: Sequence[QuantizedLinear]) -> bool:
    return len({layer.activations for layer in layers}) == 1 and all(_packed(layer) is None for layer in layers)


def _dense(layers: Sequence[QuantizedLinear]) -> Linear:
    """What torch has no packed product for is dequantized once."""
    weight = torch.cat([layer.weight() for layer in layers])
    if layers[0].activations == "fp8":
        product = dense(weight)
        return lambda inputs: product(_in_fp8(inputs))
    return dense(weight)


def _side_by_side(layers: Sequence[QuantizedLinear]) -> QuantizedLinear | None:
    """Layers as one; None if they are not stored in one way, or rows can't be put below each other."""
    if len(layers) == 1:
        return layers[0]
    stored = _rows_together([layer.stored for layer in layers])
    if stored is None or len({layer.activations for layer in layers}) > 1:
        return None
    return QuantizedLinear(stored, layers[0].activations)


def _rows_together(parts: Sequence[Stored]) -> Stored | None:
    gguf = [part for part in parts if isinstance(part, GgufTensor)]
    if len(gguf) == len(parts) and len({part.kind for part in gguf}) == 1:
        return GgufTensor(gguf[0].kind, torch.cat([part.data for part in gguf]))
    integers = [part for part in parts if isinstance(part, QuantizedTensor) and len(part.scale) == len(part.codes)]
    ways = {(part.bits, part.group_size, part.zero_point is None, part.codes.dtype) for part in integers}
    if len(integers) == len(parts) and len(ways) == 1:
        zeros = [part.zero_point for part in integers if part.zero_point is not None]
        return replace(
            integers[0],
            codes=torch.cat([part.codes for part in integers]),
            scale=torch.cat([part.scale for part in integers]),
            zero_point=torch.cat(zeros) if zeros else None,
        )
    return None


def _in_fp8(tokens: Tensor) -> Tensor:
    """Each token in E4M3 under a scale of its own."""
    return dequantize_fp8(quantize_fp8(tokens, "e4m3", "channel")) if len(tokens) else tokens
