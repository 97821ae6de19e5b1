"""Attention of a pure decode step over static inputs: its shapes, and what it launches, depend on the bucket alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory.kv_pool import KVPool
from ..models.packed_attention import LatentMaps
from ..request import blocks_for
from .attending import attend_singles, mask_of
from .decode_inputs import DecodeInputs


@dataclass(frozen=True)
class _View:
    """What rows see: the blocks that are read, `[rows, blocks]`, which of their slots are hidden, `[rows, slots]`, and
    what that adds to scores."""

    tables: Tensor
    hidden: Tensor
    mask: Tensor


class DecodeAttention:
    """Stores one key and value of each row, and lets each row read its own blocks.

    Made anew whenever the step is computed or recorded: what it derives from the inputs belongs to the step.

    Args:
        pool: the memory.
        inputs: of the step.
    """

    def __init__(self, pool: KVPool, inputs: DecodeInputs) -> None:
        self._pool = pool
        self._inputs = inputs
        self._views: dict[int | None, _View] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `PackedAttention`."""
        self._pool.write(layer, self._inputs.slots, k, v)
        keys, values = self._read(layer, window)
        return attend_singles(q, keys, values, self._view(window).mask)

    def latent(self, layer: int, q: Tensor, latents: Tensor, maps: LatentMaps) -> Tensor:
        """See `PackedAttention`: single queries always go to the latents."""
        self._pool.write(layer, self._inputs.slots, latents)
        (kept,) = self._read(layer, None)
        return maps.read_out(attend_singles(maps.absorb(q), kept, kept, self._view(None).mask, maps.scale))

    def _read(self, layer: int, window: int | None) -> list[Tensor]:
        """The parts of a layer that are seen, with 0 wherever a row must not look: a weight of 0 times NaN is NaN."""
        view = self._view(window)
        return [part.masked_fill(view.hidden[:, :, None, None], 0.0) for part in self._pool.read(layer, view.tables)]

    def _view(self, window: int | None) -> _View:
        """The same for all layers that have this window."""
        if window not in self._views:
            tables, hidden = self._seen(window)
            self._views[window] = _View(tables, hidden, mask_of(hidden)[:, None, None])
        return self._views[window]

    def _seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        tables, lengths, size = self._inputs.tables, self._inputs.lengths[:, None], self._pool.block_size
        if window is None:
            positions = torch.arange(tables.shape[1] * size, device=tables.device)
            return tables, positions >= lengths
        # A window of so many tokens lies in at most so many blocks, wherever it begins.
        count = min(tables.shape[1], 1 + blocks_for(window, size))
        skipped = ((lengths - window).clamp(min=0) // size).clamp(max=tables.shape[1] - count)
        positions = skipped * size + torch.arange(count * size, device=tables.device)
        seen = tables.gather(1, skipped + torch.arange(count, device=tables.device))
        return seen, (positions >= lengths) | (positions < lengths - window)
