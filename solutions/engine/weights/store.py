"""A model's weights of which some are quantized, and the projections that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from labkit.checkpoint_audit import GGUF_TYPES
from solutions.quantization.methods import round_channels
from solutions.quantization.quantized_model import GgufTensor, QuantizedLinear, Stored

from ..models.blocks import HeldWeights
from ..models.dense import Linear
from .formats import Rounding
from .packing import Packing
from .projection import projection

_HEADS = ("lm_head", "model.embed_tokens")
"""Where the matrix of the output projection lies: apart, or tied to the embedding."""


class QuantizedWeights(HeldWeights):
    """Tensors of which those that projections are made of come quantized.

    Embeddings, norms, routers and whatever else a family reads as a tensor stay plain.

    Args:
        tensors: the plain ones.
        stored: layers by name, without ".weight", that a checkpoint holds quantized. As tensors they have a shape but
            no numbers.
        rounding: what becomes of the other projections; None leaves them plain.
        packing: how quantized layers run.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], stored: Mapping[str, QuantizedLinear] | None = None,
        rounding: Rounding | None = None, packing: Packing | None = None,
    ) -> None:  # fmt: skip
        self._stored = stored or {}
        self._rounding = rounding
        self._packing = packing or Packing()
        self.made: dict[tuple[str, ...], Linear] = {}
        """The projections made so far, by the names of their layers; shared with what `with_tensors` returns."""
        shapes = {
            f"{name}.weight": torch.empty(_shape(layer.stored), device="meta") for name, layer in self._stored.items()
        }
        self._tensors = {**tensors, **shapes}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> QuantizedWeights:
        """See `HeldWeights`."""
        names = {name.removesuffix(".weight") for name in tensors}
        found = QuantizedWeights({}, None, self._rounding, self._packing)
        found._stored = {name: layer for name, layer in self._stored.items() if name in names}
        found._tensors = dict(tensors)
        found.made = self.made
        return found

    def joined(self, names: Sequence[str]) -> Linear:
        """See `HeldWeights`."""
        try:
            made = projection([self._layer(name) for name in names], self._packing)
        except ValueError as error:
            raise ValueError(f"{', '.join(names)}: {error}") from error
        self.made[tuple(names)] = made
        return made

    def joins(self, name: str) -> bool:
        """See `HeldWeights`."""
        if name in _HEADS:
            return self._packing.head_bits is not None
        return name in self._stored or self._rounding is not None

    def _layer(self, name: str) -> QuantizedLinear:
        if name in self._stored:
            return self._stored[name]
        weight = self._tensors[f"{name}.weight"].to(torch.float32)
        if name in _HEADS:
            return QuantizedLinear(round_channels(weight, 8))
        return QuantizedLinear(GgufTensor("F32", weight)) if self._rounding is None else self._rounding(weight)


def _shape(stored: Stored) -> tuple[int, ...]:
    """Rows and columns of a matrix, without making its numbers."""
    if not isinstance(stored, GgufTensor):
        return tuple(stored.codes.shape)
    rows, width = stored.data.shape
    block = GGUF_TYPES.get(stored.kind)
    return (rows, width) if block is None else (rows, width // block.num_bytes * block.elements)
