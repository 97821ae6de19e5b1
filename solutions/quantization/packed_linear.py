"""Quantized layers that stay packed while they run, by torch's integer products for CPUs.

A decode step reads every weight once, so it takes as long as its bytes: there the packed product wins. Behind a prompt
of many tokens arithmetic counts, and on CPUs without fast bfloat16 a plain product of dequantized weights wins. Both
ways use the *packed* numbers, whose scales are bfloat16 and so up to 0.4 % off the checkpoint's: with two sets of
numbers, prefill and decode would be two models.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.decoder import Decoder, weight_shapes
from labkit.quantized import QuantizedTensor
from solutions.quantization.gguf_blocks import split_blocks
from solutions.quantization.methods import round_channels
from solutions.quantization.packing import pack_int4, unpack_int4
from solutions.quantization.quantized_model import GgufTensor, QuantizedLinear, QuantizedModel

PACKED_TOKENS = 16
"""Up to so many tokens at once the packed int4 product runs; measured on a CPU with AVX2, where they meet there."""
_GROUPS = (32, 64, 128, 256)
_MIDDLE = 8


class PackedLinear(Protocol):
    """A linear layer without its bias."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """`[..., in]` float32 -> `[..., out]` float32."""

    def dequantized(self) -> Tensor:
        """The matrix that the packed numbers stand for, float32 `[out, in]`."""


class StorableLinear(PackedLinear, Protocol):
    """A packed layer that can be kept on disk."""

    def tensors(self) -> dict[str, Tensor]:
        """All that it holds, by names of its own."""

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The layer that gave these tensors, by the same torch on a CPU of the same kind: the order of packed codes
        depends on both."""


class Int4Linear:
    """Weights of up to 4 bits with a scale and a minimum for each group: value = scale · (code − 8) + middle.

    Args:
        codes: 0 … 15, `[out, in]`.
        scale: `[out, groups]`.
        middle: the value of code 8, `[out, groups]`.
        packed_tokens: up to so many tokens the packed product runs.

    Raises:
        ValueError: sizes that torch's packed product does not know.
    """

    def __init__(self, codes: Tensor, scale: Tensor, middle: Tensor, packed_tokens: int = PACKED_TOKENS) -> None:
        rows, columns = codes.shape
        self.group_size, rest = divmod(columns, scale.shape[1])
        if rest or self.group_size not in _GROUPS or rows % 16 or columns % 2:
            raise ValueError(
                f"the packed int4 product takes groups of {', '.join(map(str, _GROUPS))} and rows in sixteens, got "
                f"{rows} × {columns} in {scale.shape[1]} groups"
            )
        self._columns, self._packed_tokens = columns, packed_tokens
        # torch's own order of nibbles depends on the CPU, so the codes are kept a second time for the other way.
        self._codes = pack_int4(codes, signed=False)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        self._shared = torch.stack((scale, middle), -1).to(torch.bfloat16).transpose(0, 1).contiguous()

    def tensors(self) -> dict[str, Tensor]:
        """As `StorableLinear`."""
        return {"codes": self._codes, "packed": self._packed, "shared": self._shared}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], packed_tokens: int = sys.maxsize) -> Self:
        """As `StorableLinear`."""
        layer = cls.__new__(cls)
        layer._codes, layer._packed, layer._shared = (tensors[name] for name in ("codes", "packed", "shared"))
        layer._columns, layer._packed_tokens = 2 * layer._codes.shape[1], packed_tokens
        layer.group_size = layer._columns // len(layer._shared)
        return layer

    def __call__(self, inputs: Tensor) -> Tensor:
        """As `PackedLinear`; the packed product reads its inputs in bfloat16."""
        tokens = inputs.reshape(-1, self._columns)
        if len(tokens) > self._packed_tokens:
            return F.linear(inputs, self.dequantized())
        outputs = torch.ops.aten._weight_int4pack_mm_for_cpu(
            tokens.to(torch.bfloat16), self._packed, self.group_size, self._shared
        )
        return outputs.to(torch.float32).reshape(*inputs.shape[:-1], -1)

    def dequantized(self) -> Tensor:
        """As `PackedLinear`."""
        scale, middle = self._shared.to(torch.float32).transpose(0, 1).unbind(-1)
        codes = unpack_int4(self._codes, self._columns, signed=False).to(torch.float32)
        grouped = codes.unflatten(-1, (-1, self.group_size)) - _MIDDLE
        return torch.addcmul(middle[..., None], grouped, scale[..., None]).flatten(-2)


class Int8Linear:
    """W8A8: each token's activations are rounded to 8 bits, and products are added up in int32.

    Args:
        q: symmetric codes with one scale a row.

    Raises:
        ValueError: other codes.
    """

    def __init__(self, q: QuantizedTensor) -> None:
        if q.zero_point is not None or q.codes.dtype != torch.int8 or tuple(q.scale.shape) != (len(q.codes), 1):
            raise ValueError(f"W8A8 takes int8 codes with one scale a row, got {q.codes.dtype}, {list(q.scale.shape)}")
        self._codes = q.codes.contiguous()
        self._scale = q.scale[:, 0].to(torch.float32)

    def __call__(self, inputs: Tensor) -> Tensor:
        """As `PackedLinear`."""
        tokens = inputs.reshape(-1, inputs.shape[-1])
        scale = tokens.abs().amax(-1, keepdim=True) / 127
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        rounded = (tokens / scale).round().clamp(-128, 127).to(torch.int8)
        sums = torch._int_mm(rounded, self._codes.T)
        return (sums * scale * self._scale).reshape(*inputs.shape[:-1], -1)

    def dequantized(self) -> Tensor:
        """As `PackedLinear`."""
        return self._codes * self._scale[:, None]


class Int8WeightLinear:
    """Weights in 8 bits with one scale a row, and activations in bfloat16: for a head, which is read at every step.

    Args:
        q: symmetric codes with one scale a row.
    """

    def __init__(self, q: QuantizedTensor) -> None:
        self._codes = q.codes.contiguous()
        self._scale = q.scale[:, 0].to(torch.bfloat16)

    def tensors(self) -> dict[str, Tensor]:
        """As `StorableLinear`."""
        return {"codes": self._codes, "scale": self._scale}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> Self:
        """As `StorableLinear`."""
        layer = cls.__new__(cls)
        layer._codes, layer._scale = tensors["codes"], tensors["scale"]
        return layer

    def __call__(self, inputs: Tensor) -> Tensor:
        """As `PackedLinear`."""
        tokens = inputs.reshape(-1, inputs.shape[-1]).to(torch.bfloat16)
        outputs = torch.ops.aten._weight_int8pack_mm(tokens, self._codes, self._scale)
        return outputs.to(torch.float32).reshape(*inputs.shape[:-1], -1)

    def dequantized(self) -> Tensor:
        """As `PackedLinear`."""
        return self._codes * self._scale.to(torch.float32)[:, None]


class PackedDecoder(Decoder):
    """A decoder whose quantized layers stay packed; what no packed product knows is dequantized once.

    Args:
        model: the checkpoint.
        head_bits: 8 packs the output projection too, with one scale a row; None leaves it in float32.
        packed_tokens: as for `Int4Linear`.
    """

    def __init__(self, model: QuantizedModel, head_bits: int | None = None, packed_tokens: int = PACKED_TOKENS) -> None:
        if head_bits not in (None, 8):
            raise ValueError(f"the head is packed in 8 bits, or with None left alone; got {head_bits}")
        found = {name: pack_linear(linear, packed_tokens) for name, linear in model.linears.items()}
        self.packed: dict[str, PackedLinear] = {name: layer for name, layer in found.items() if layer is not None}
        weights, shapes = dict(model.floats), weight_shapes(model.config)
        for name, linear in model.linears.items():
            # What is packed gets a shape without memory: the decoder checks it and never reads it.
            empty = torch.empty(shapes[f"{name}.weight"], device="meta")
            weights[f"{name}.weight"] = empty if name in self.packed else linear.weight()
        super().__init__(model.config, weights)
        if head_bits == 8:
            head = "model.embed_tokens" if model.config.tie_embeddings else "lm_head"
            self.packed[head] = Int8WeightLinear(round_channels(self.weights[f"{head}.weight"], 8))

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        """As `Decoder.linear`."""
        if name not in self.packed:
            return super().linear(inputs, name)
        outputs, bias = self.packed[name](inputs), self.weights.get(f"{name}.bias")
        return outputs if bias is None else outputs + bias


def pack_linear(linear: QuantizedLinear, packed_tokens: int = PACKED_TOKENS) -> PackedLinear | None:
    """The packed form of a layer; None if torch has no product for it."""
    stored = linear.stored
    if linear.activations == "int8" and isinstance(stored, QuantizedTensor):
        return Int8Linear(stored)
    if linear.activations != "float":
        return None
    try:
        if isinstance(stored, GgufTensor) and stored.kind in ("Q4_0", "Q4_1"):
            codes, scale, minimum = split_blocks(stored.data, stored.kind)
            middle = torch.zeros_like(scale) if minimum is None else minimum + _MIDDLE * scale
            return Int4Linear(codes.flatten(-2), scale[..., 0], middle[..., 0], packed_tokens)
        if isinstance(stored, QuantizedTensor) and stored.bits <= 4:
            if stored.zero_point is None:
                raised = stored.codes.to(torch.int16) + _MIDDLE
                return Int4Linear(raised, stored.scale, torch.zeros_like(stored.scale), packed_tokens)
            middle = stored.scale * (_MIDDLE - stored.zero_point)
            return Int4Linear(stored.codes, stored.scale, middle, packed_tokens)
    except ValueError:
        return None
    return None
