"""Attention of a pure decode step over static inputs: its shapes, and what it launches, depend on the bucket alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_inputs import DecodeInputs
from .kv_pool import KVPool
from .models.packed_attention import LatentMaps
from .request import blocks_for


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
        # By window: the blocks that are read, `[rows, blocks]`, and which of their slots are hidden.
        self._views: dict[int | None, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `PackedAttention`."""
        self._pool.write(layer, self._inputs.slots, k, v)
        (keys, values), hidden = self._read(layer, window)
        return _attend(q, keys, values, hidden)

    def latent(self, layer: int, q: Tensor, latents: Tensor, maps: LatentMaps) -> Tensor:
        """See `PackedAttention`: single queries always go to the latents."""
        self._pool.write(layer, self._inputs.slots, latents)
        (kept,), hidden = self._read(layer, None)
        return maps.read_out(_attend(maps.absorb(q), kept, kept, hidden, maps.scale))

    def _read(self, layer: int, window: int | None) -> tuple[list[Tensor], Tensor]:
        """The parts of a layer that are seen, with 0 wherever a row must not look: a weight of 0 times NaN is NaN."""
        if window not in self._views:
            self._views[window] = self._view(window)
        tables, hidden = self._views[window]
        return [part.masked_fill(hidden[:, :, None, None], 0.0) for part in self._pool.read(layer, tables)], hidden

    def _view(self, window: int | None) -> tuple[Tensor, Tensor]:
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


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float | None = None) -> Tensor:
    """`[rows, heads, head_dim]`, one query each, over `[rows, length, kv_heads, head_dim]`."""
    read = F.scaled_dot_product_attention(
        q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), ~hidden[:, None, None], scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    return read[:, :, 0]
