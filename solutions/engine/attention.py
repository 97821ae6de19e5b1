"""Attention of one step over paged keys and values: single tokens in one batch, longer pieces one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from solutions.speculative.tree import ancestor_mask

from .kv_pool import KVPool
from .models.packed_attention import LatentMaps
from .step import Work


@dataclass(frozen=True)
class _Singles:
    """What requests with a single token see: their blocks `[requests, blocks]`, and which of the slots in them are
    hidden, `[requests, blocks * block_size]`."""

    tables: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class _Piece:
    """Several tokens of one request: where they stand in the pass, the blocks that they see, how many tokens these
    hold, and which of those each query sees, `[queries, length]`."""

    rows: slice
    blocks: Tensor
    length: int
    visible: Tensor


class PagedAttention:
    """Stores the new keys and values of a step, and lets each query read its own request's, up to itself.

    Requests that compute a single token are padded to the longest of them and attend together; what lies behind a
    request's end is masked. Longer pieces attend one after the other, against keys that are theirs alone. In a layer
    with a window nobody reads blocks that lie before it.

    Args:
        pool: the memory.
        work: of the step, in the order of its tokens.
    """

    def __init__(self, pool: KVPool, work: tuple[Work, ...]) -> None:
        self._pool = pool
        self.slots = torch.tensor([slot for one in work for slot in one.slots])
        self._long: list[tuple[int, Work]] = []
        self._short: list[tuple[int, Work]] = []
        first = 0
        for one in work:
            (self._short if len(one.tokens) == 1 else self._long).append((first, one))
            first += len(one.tokens)
        self._single_rows = torch.tensor([row for row, _ in self._short], dtype=torch.int64)
        # By window: the layers of a model have few different ones.
        self._views: dict[int | None, tuple[_Singles | None, list[_Piece]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `PackedAttention`."""
        self._pool.write(layer, self.slots, k, v)
        singles, pieces = self._view(window)
        out = torch.empty_like(q)
        if singles is not None:
            keys, values = self._read(layer, singles)
            out[self._single_rows] = _attend_one(q[self._single_rows], keys, values, singles.hidden)
        for piece in pieces:
            keys, values = (part[: piece.length] for part in self._pool.read(layer, piece.blocks))
            out[piece.rows] = _attend(q[piece.rows], keys, values, piece.visible)
        return out

    def latent(self, layer: int, q: Tensor, latents: Tensor, maps: LatentMaps) -> Tensor:
        """See `PackedAttention`: few queries go to the latents, for many keys and values are made of the latents."""
        self._pool.write(layer, self.slots, latents)
        singles, pieces = self._view(None)
        out = q.new_empty(*q.shape[:2], maps.v_head_dim)
        if singles is not None:
            (kept,) = self._read(layer, singles)
            read = _attend_one(maps.absorb(q[self._single_rows]), kept, kept, singles.hidden, maps.scale)
            out[self._single_rows] = maps.read_out(read)
        for piece in pieces:
            kept = self._pool.read(layer, piece.blocks)[0][: piece.length]
            queries = q[piece.rows]
            if maps.is_absorbed(len(queries), piece.length):
                out[piece.rows] = maps.read_out(_attend(maps.absorb(queries), kept, kept, piece.visible, maps.scale))
            else:
                out[piece.rows] = _attend(queries, *maps.expand(kept), piece.visible, maps.scale)
        return out

    def _view(self, window: int | None) -> tuple[_Singles | None, list[_Piece]]:
        """What is seen through a window; the same for all layers that have it."""
        if window not in self._views:
            pieces = [self._piece(first, one, window) for first, one in self._long]
            self._views[window] = self._singles(window) if self._short else None, pieces
        return self._views[window]

    def _singles(self, window: int | None) -> _Singles:
        size = self._pool.block_size
        skipped = [_blocks_before(one.end - 1, window, size) for _, one in self._short]
        most = max(len(one.blocks) - skip for (_, one), skip in zip(self._short, skipped, strict=True))
        # Padding repeats the first block: it exists, and is masked.
        tables = torch.tensor([
            [*one.blocks[skip:], *one.blocks[:1] * (most - len(one.blocks) + skip)]
            for (_, one), skip in zip(self._short, skipped, strict=True)
        ])  # fmt: skip
        ends = torch.tensor([one.end for _, one in self._short])[:, None]
        positions = torch.tensor(skipped)[:, None] * size + torch.arange(most * size)
        hidden = positions >= ends
        return _Singles(tables, hidden if window is None else hidden | (positions < ends - window))

    def _piece(self, first: int, one: Work, window: int | None) -> _Piece:
        size, count = self._pool.block_size, len(one.tokens)
        skip = _blocks_before(one.start, window, size)
        keys = torch.tensor([*range(skip * size, one.start), *one.positions])
        queries = keys[-count:, None]
        visible = keys <= queries
        if one.parents:
            visible[-one.num_drafts :, -one.num_drafts :] = ancestor_mask(one.parents)
        if window is not None:
            visible &= keys > queries - window
        return _Piece(slice(first, first + count), torch.tensor(one.blocks[skip:]), len(keys), visible)

    def _read(self, layer: int, singles: _Singles) -> list[Tensor]:
        """Whatever a masked slot holds must not reach the answer: a weight of 0 times NaN is NaN."""
        hidden = singles.hidden[:, :, None, None]
        return [part.masked_fill(hidden, 0.0) for part in self._pool.read(layer, singles.tables)]


def _blocks_before(position: int, window: int | None, block_size: int) -> int:
    """Blocks of which a query at a position, and all behind it, see nothing."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float | None = None) -> Tensor:
    """`[requests, heads, head_dim]`, one query each, over `[requests, length, kv_heads, head_dim]`."""
    read = F.scaled_dot_product_attention(
        q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), ~hidden[:, None, None], scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    return read[:, :, 0]


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    """`[queries, heads, head_dim]` of one request, over `[length, kv_heads, head_dim]`."""
    read = F.scaled_dot_product_attention(
        q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), visible, scale=scale, enable_gqa=True
    )
    return read.transpose(0, 1)
