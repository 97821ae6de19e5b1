"""A quantized model in memory: what each linear layer stores, what it stands for, and how the layer runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checkpoint_audit import GGUF_TYPES
from labkit.config import ModelConfig
from labkit.decoder import Decoder
from labkit.float_formats import Fp8Tensor, Mxfp4Tensor, Nf4Tensor, Nvfp4Tensor, QuantizedAbsmax
from labkit.quantized import QuantizedTensor
from solutions.quantization.fp8 import dequantize_fp8, quantize_fp8
from solutions.quantization.gguf_blocks import decode_blocks
from solutions.quantization.hadamard import hadamard_transform
from solutions.quantization.k_quants import decode_q4_k, decode_q6_k
from solutions.quantization.llm_int8 import llm_int8_linear
from solutions.quantization.microscaling import dequantize_mxfp4, dequantize_nvfp4
from solutions.quantization.nf4 import dequantize_nf4
from solutions.quantization.smoothquant import w8a8_linear
from solutions.quantization.uniform import dequantize, quantize

ACTIVATIONS = ("float", "int8", "fp8", "llm.int8", "int4", "hadamard-int4")
"""How a layer's inputs are treated: left alone; quantized for each token; in 8 bits but for outlier features; in 4 bits
behind a Hadamard transform, which the weights undo."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Args:
        kind: "F32", "F16", or a block type such as "Q4_0".
        data: the numbers, or for a block type its bytes, uint8 `[rows, bytes]`.
    """

    kind: str
    data: Tensor


Stored = QuantizedTensor | Fp8Tensor | Nf4Tensor | Mxfp4Tensor | Nvfp4Tensor | GgufTensor


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer after quantization.

    Args:
        stored: its weight.
        activations: one of `ACTIVATIONS`.
    """

    stored: Stored
    activations: str = "float"

    def weight(self) -> Tensor:
        """The matrix that the stored numbers stand for, float32 `[out, in]`."""
        return dequantized(self.stored)


@dataclass(frozen=True)
class QuantizedModel:
    """All that a checkpoint holds.

    Args:
        config: sizes.
        linears: the quantized layers by name, without ".weight".
        floats: every other tensor under its Hugging Face name, float32 with values that float16 holds.
    """

    config: ModelConfig
    linears: Mapping[str, QuantizedLinear]
    floats: Mapping[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """All weights in float32, as the quantized numbers stand for them."""
        return dict(self.floats) | {f"{name}.weight": linear.weight() for name, linear in self.linears.items()}

    def decoder(self) -> Decoder:
        """The model that these weights are, with the activations treated as they should be."""
        return SimulatedDecoder(self)

    def num_bytes(self) -> float:
        """Bytes of everything, the unquantized tensors in 16 bits."""
        quantized = sum(stored_bits(linear.stored) for linear in self.linears.values()) / 8
        return quantized + 2 * sum(tensor.numel() for tensor in self.floats.values())

    def bits_per_weight(self) -> float:
        """Bits of a weight in the quantized layers on average, scales and zero points included."""
        bits = sum(stored_bits(linear.stored) for linear in self.linears.values())
        return bits / sum(stored_numel(linear.stored) for linear in self.linears.values())


class SimulatedDecoder(Decoder):
    """A decoder over dequantized weights, whose layers also quantize their inputs where the method says so.

    It shows what a method does to quality; for speed there is `packed_linear`.

    Args:
        model: the quantized model.
    """

    def __init__(self, model: QuantizedModel) -> None:
        super().__init__(model.config, model.weights())
        self._linears = {n: linear for n, linear in model.linears.items() if linear.activations != "float"}

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        """As `Decoder.linear`."""
        if name not in self._linears:
            return super().linear(inputs, name)
        linear, bias = self._linears[name], self.weights.get(f"{name}.bias")
        if linear.activations == "int8":
            if not isinstance(linear.stored, QuantizedTensor):
                raise ValueError(f"{name}: integer activations need an integer weight")
            return w8a8_linear(inputs, linear.stored, bias)
        weight = self.weights[f"{name}.weight"]
        if linear.activations == "llm.int8":
            outputs = llm_int8_linear(inputs, weight)
            return outputs if bias is None else outputs + bias
        if linear.activations == "hadamard-int4":
            inputs = hadamard_transform(inputs)
        tokens = inputs.flatten(0, -2)
        if linear.activations == "fp8":
            rounded = dequantize_fp8(quantize_fp8(tokens, "e4m3", "channel"))
        else:
            rounded = dequantize(quantize(tokens, 4, granularity="token"))
        return F.linear(rounded.view_as(inputs), weight, bias)


def dequantized(stored: Stored) -> Tensor:
    """The matrix that stored numbers stand for, float32 `[out, in]`."""
    if isinstance(stored, QuantizedTensor):
        return dequantize(stored).to(torch.float32)
    if isinstance(stored, Fp8Tensor):
        return dequantize_fp8(stored)
    if isinstance(stored, Nf4Tensor):
        return dequantize_nf4(stored)
    if isinstance(stored, Mxfp4Tensor):
        return dequantize_mxfp4(stored)
    if isinstance(stored, Nvfp4Tensor):
        return dequantize_nvfp4(stored)
    if stored.kind in ("F32", "F16"):
        return stored.data.to(torch.float32)
    if stored.kind in ("Q4_K", "Q6_K"):
        return (decode_q4_k if stored.kind == "Q4_K" else decode_q6_k)(stored.data)
    return decode_blocks(stored.data, stored.kind)


def stored_numel(stored: Stored) -> int:
    """Number of weights."""
    if not isinstance(stored, GgufTensor):
        return stored.codes.numel()
    if stored.kind not in GGUF_TYPES:
        return stored.data.numel()
    block = GGUF_TYPES[stored.kind]
    return stored.data.numel() // block.num_bytes * block.elements


def stored_bits(stored: Stored) -> float:
    """Bits that the weights take, scales and zero points included: float scales of integer codes in 16 bits."""
    if isinstance(stored, GgufTensor):
        per_number = {"F32": 32, "F16": 16}.get(stored.kind, 8)
        return stored.data.numel() * per_number
    if isinstance(stored, QuantizedTensor):
        zero = 0 if stored.zero_point is None else stored.bits
        return stored.codes.numel() * stored.bits + stored.scale.numel() * (16 + zero)
    if isinstance(stored, Fp8Tensor):
        return 8 * stored.codes.numel() + 16 * stored.scale.numel()
    if isinstance(stored, Nf4Tensor):
        absmax = stored.absmax
        if isinstance(absmax, QuantizedAbsmax):
            return 4 * stored.codes.numel() + 8 * absmax.codes.numel() + 32 * absmax.scale.numel()
        return 4 * stored.codes.numel() + 32 * absmax.numel()
    return 4 * stored.codes.numel() + 8 * stored.scale_codes.numel()
