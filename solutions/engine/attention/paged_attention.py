"""Attention of one step over paged keys and values: single tokens in one batch, longer pieces one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solutions.speculative.tree import ancestor_mask

from ..memory.kv_pool import KVPool
from ..models.packed_attention import LatentMaps
from ..step import Work
from .attending import attend_piece, attend_singles, mask_of

Blocks = Tensor | slice
"""Ids of blocks, int64; a slice if they follow each other in the pool and can be read where they lie."""


@dataclass(frozen=True)
class _Singles:
    """What requests with a single token see.

    Args:
        rows: where they stand in the pass, int64 `[requests]`.
        blocks: ids `[requests, blocks]`; the blocks of one request alone may be a run.
        length: slots of each request that are read.
        stale: which of all `requests * length` slots hold nothing of the request, int64; None if all do.
        mask: added to scores, 0 or −inf, `[requests, 1, 1, length]`; None if all is seen.
    """

    rows: Tensor
    blocks: Blocks
    length: int
    stale: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class _Piece:
    """Several tokens of one request: where they stand in the pass, the blocks that they see, how many tokens these
    hold, and which of those each query sees, `[queries, length]`; None if these are all of a text, read for the first
    time, and each query sees what is before it, and itself."""

    rows: slice
    blocks: Blocks
    length: int
    visible: Tensor | None


class PagedAttention:
    """Stores the new keys and values of a step, and lets each query read its own request's, up to itself.

    Requests that compute a single token attend together with those of about their length, padded to the longest of
    them; what lies behind a request's end is masked. Longer pieces attend one after the other, against keys that are
    theirs alone. Whoever attends alone reads its keys in place if its blocks follow each other, and gathers them if
    not. In a layer with a window nobody reads blocks that lie before it.

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
        # By window: the layers of a model have few different ones.
        self._views: dict[int | None, tuple[list[_Singles], list[_Piece]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `PackedAttention`."""
        self._pool.write(layer, self.slots, k, v)
        singles, pieces = self._view(window)
        if len(singles) == 1 and not pieces:  # every row is one of them, and they stand in order
            keys, values = self._read(layer, singles[0])
            return attend_singles(q, keys, values, singles[0].mask)
        out = torch.empty_like(q)
        for one in singles:
            keys, values = self._read(layer, one)
            out[one.rows] = attend_singles(q[one.rows], keys, values, one.mask)
        for piece in pieces:
            keys, values = (part[: piece.length] for part in self._pool.read(layer, piece.blocks))
            out[piece.rows] = attend_piece(q[piece.rows], keys, values, piece.visible)
        return out

    def latent(self, layer: int, q: Tensor, latents: Tensor, maps: LatentMaps) -> Tensor:
        """See `PackedAttention`: few queries go to the latents, for many keys and values are made of the latents."""
        self._pool.write(layer, self.slots, latents)
        singles, pieces = self._view(None)
        out = q.new_empty(*q.shape[:2], maps.v_head_dim)
        for one in singles:
            (kept,) = self._read(layer, one)
            out[one.rows] = maps.read_out(attend_singles(maps.absorb(q[one.rows]), kept, kept, one.mask, maps.scale))
        for piece in pieces:
            kept = self._pool.read(layer, piece.blocks)[0][: piece.length]
            queries = q[piece.rows]
            if maps.is_absorbed(len(queries), piece.length):
                read = maps.read_out(attend_piece(maps.absorb(queries), kept, kept, piece.visible, maps.scale))
            else:
                read = attend_piece(queries, *maps.expand(kept), piece.visible, maps.scale)
            out[piece.rows] = read
        return out

    def _view(self, window: int | None) -> tuple[list[_Singles], list[_Piece]]:
        """What is seen through a window; the same for all layers that have it."""
        if window not in self._views:
            pieces = [self._piece(first, one, window) for first, one in self._long]
            self._views[window] = [self._singles(short, window) for short in _by_length(self._short)], pieces
        return self._views[window]

    def _singles(self, short: list[tuple[int, Work]], window: int | None) -> _Singles:
        size, rows = self._pool.block_size, torch.tensor([row for row, _ in short])
        skipped = [_blocks_before(one.end - 1, window, size) for _, one in short]
        if len(short) == 1:
            (_, one), (skip,) = short[0], skipped
            length, blocks = one.end - skip * size, _run(one.blocks[skip:])
            seen = length if window is None else min(length, window)
            mask = None if seen == length else mask_of(torch.arange(length) < length - seen)[None, None, None]
            return _Singles(rows, blocks if isinstance(blocks, slice) else blocks[None], length, None, mask)
        most = max(len(one.blocks) - skip for (_, one), skip in zip(short, skipped, strict=True))
        # Padding repeats the first block: it exists, and is masked.
        tables = torch.tensor([
            [*one.blocks[skip:], *one.blocks[:1] * (most - len(one.blocks) + skip)]
            for (_, one), skip in zip(short, skipped, strict=True)
        ])  # fmt: skip
        # On the host, wherever the pool lies: finding what is stale would wait for a device.
        ends = torch.tensor([one.end for _, one in short], device="cpu")[:, None]
        positions = torch.tensor(skipped, device="cpu")[:, None] * size + torch.arange(most * size, device="cpu")
        behind = positions >= ends
        hidden = behind if window is None else behind | (positions < ends - window)
        stale, mask = (one.to(tables.device) for one in (behind.flatten().nonzero()[:, 0], mask_of(hidden)))
        return _Singles(rows, tables, most * size, stale, mask[:, None, None])

    def _piece(self, first: int, one: Work, window: int | None) -> _Piece:
        size, count = self._pool.block_size, len(one.tokens)
        skip = _blocks_before(one.start, window, size)
        keys = torch.tensor([*range(skip * size, one.start), *one.positions])
        queries = keys[-count:, None]
        visible = keys <= queries
        if one.parents:
            visible[-one.num_drafts :, -one.num_drafts :] = ancestor_mask(one.parents).to(keys.device)
        if window is not None:
            visible &= keys > queries - window
        is_plain = one.start == 0 and window is None and not one.parents
        return _Piece(slice(first, first + count), _run(one.blocks[skip:]), len(keys), None if is_plain else visible)

    def _read(self, layer: int, singles: _Singles) -> list[Tensor]:
        """Parts `[requests, length, heads, head_dim]` of a layer.

        Whatever a former owner left in a slot must not reach the answer: a weight of 0 times NaN is NaN.
        """
        parts = [part.view(-1, *part.shape[-2:]) for part in self._pool.read(layer, singles.blocks)]
        if singles.stale is None:
            return [part[None, : singles.length] for part in parts]
        return [part.index_fill_(0, singles.stale, 0.0).unflatten(0, (-1, singles.length)) for part in parts]


def _blocks_before(position: int, window: int | None, block_size: int) -> int:
    """Blocks of which a query at a position, and all behind it, see nothing."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


def _by_length(short: list[tuple[int, Work]]) -> list[list[tuple[int, Work]]]:
    """Requests of about one length together: no table of a group has four times the blocks of another.

    Padded to one long text, many short ones would read as much as it does.
    """
    groups: dict[int, list[tuple[int, Work]]] = {}
    for row, one in short:
        groups.setdefault((len(one.blocks).bit_length() + 1) // 2, []).append((row, one))
    return list(groups.values())


def _run(blocks: tuple[int, ...]) -> Blocks:
    """Blocks as a slice if they follow each other."""
    first, end = blocks[0], blocks[0] + len(blocks)
    return slice(first, end) if blocks == tuple(range(first, end)) else torch.tensor(blocks)
