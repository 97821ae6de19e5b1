"""Attention of one step over a `KiviPool`: each query sees its own block as it came, and those before it as codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory.kivi_pool import KiviPool
from ..models.packed_attention import LatentMaps
from ..request import blocks_for
from ..step import Work
from .attending import attend_piece, attend_singles


@dataclass(frozen=True)
class _Singles:
    """Requests with a single token.

    Args:
        rows: of the pass, `[requests]`.
        blocks: those before the token's own, padded, `[requests, blocks]`.
        own: the block of each token.
        pages: of these blocks.
        starts: position at which these blocks begin, `[requests, 1]`.
        offsets: of the tokens in them.
        filled: which of the requests fill their block.
    """

    rows: Tensor
    blocks: Tensor
    own: Tensor
    pages: Tensor
    starts: Tensor
    offsets: Tensor
    filled: Tensor


@dataclass(frozen=True)
class _Piece:
    """Several tokens of one request.

    Args:
        rows: of the pass.
        begun: page of the block in which the tokens begin, and how many tokens before them it holds.
        filled: blocks that the tokens fill, `[blocks]`.
        kept: page of each block that stays open, and the tokens that go to it: the first of them, as counted from the
            beginning of the first block, and how many.
        blocks: those before the last token's own, `[blocks]`.
        work: whose they are.
    """

    rows: slice
    begun: tuple[int, int]
    filled: Tensor
    kept: list[tuple[int, int, int]]
    blocks: Tensor
    work: Work


class KiviAttention:
    """Stores the new keys and values of a step, and lets each query read its own request's, up to itself.

    What a query sees depends on its place alone: the tokens of its own block in full precision, all before as codes. So
    it does not matter in which pieces a text was computed, nor what was drafted on the way: a pass that computes many
    tokens has both forms of them, and shows each query the right one.

    Args:
        pool: the memory.
        work: of the step, in the order of its tokens.
    """

    def __init__(self, pool: KiviPool, work: tuple[Work, ...]) -> None:
        self._pool = pool
        self.slots = torch.tensor([slot for one in work for slot in one.slots])
        self._pieces: list[_Piece] = []
        short: list[tuple[int, Work]] = []
        first = 0
        for one in work:
            if len(one.tokens) == 1:
                short.append((first, one))
            else:
                self._pieces.append(self._piece(first, one))
            first += len(one.tokens)
        self._singles = self._together(short) if short else None
        # By window: the layers of a model have few different ones.
        self._masks: dict[int | None, tuple[Tensor | None, list[Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """See `PackedAttention`."""
        if window not in self._masks:
            singles = None if self._singles is None else self._mask_of_singles(self._singles, window)
            self._masks[window] = singles, [self._mask_of_piece(piece, window) for piece in self._pieces]
        mask, masks = self._masks[window]
        out = torch.empty_like(q)
        if self._singles is not None and mask is not None:
            single = self._singles.rows
            keys, values = self._read_singles(layer, self._singles, k[single], v[single])
            out[single] = attend_singles(q[single], keys, values, mask)
        for piece, visible in zip(self._pieces, masks, strict=True):
            rows = piece.rows
            keys, values = self._read_piece(layer, piece, k[rows], v[rows])
            out[rows] = attend_piece(q[rows], keys, values, visible)
        return out

    def latent(self, layer: int, q: Tensor, latents: Tensor, maps: LatentMaps) -> Tensor:
        """See `PackedAttention`; a `KiviPool` refuses such models."""
        raise NotImplementedError("KIVI keeps keys and values, no latents")

    def _together(self, short: list[tuple[int, Work]]) -> _Singles:
        size = self._pool.block_size
        before = [one.start // size for _, one in short]
        own = [one.blocks[count] for (_, one), count in zip(short, before, strict=True)]
        starts, offsets = torch.tensor(before)[:, None] * size, torch.tensor([one.start % size for _, one in short])
        # Padding repeats the first block: it exists, and is masked.
        tables = [
            [*one.blocks[:count], *one.blocks[:1] * (max(before) - count)]
            for (_, one), count in zip(short, before, strict=True)
        ]
        return _Singles(
            torch.tensor([row for row, _ in short]), torch.tensor(tables, dtype=torch.int64), torch.tensor(own),
            torch.tensor([self._pool.page(block) for block in own]), starts, offsets,
            (offsets == size - 1).nonzero()[:, 0],
        )  # fmt: skip

    def _piece(self, first: int, one: Work) -> _Piece:
        size = self._pool.block_size
        begin, end = one.start // size, one.end // size
        kept = range((one.end - one.num_drafts) // size, blocks_for(one.end, size))
        begun = 0
        if one.start % size:
            begun = self._pool.page(one.blocks[begin])
            if begin not in kept and len(kept):
                # In each layer what the page holds is read before anything is written to it.
                self._pool.pass_page(one.blocks[begin], to=one.blocks[kept[0]])
        pages = [(self._pool.page(one.blocks[index]), max(0, index - begin) * size) for index in kept]
        total = one.end - begin * size
        return _Piece(
            slice(first, first + len(one.tokens)), (begun, one.start % size), torch.tensor(one.blocks[begin:end]),
            [(page, start, min(size, total - start)) for page, start in pages],
            torch.tensor(one.blocks[: (one.end - 1) // size], dtype=torch.int64), one,
        )  # fmt: skip

    def _read_singles(self, layer: int, singles: _Singles, k: Tensor, v: Tensor) -> list[Tensor]:
        """Keys and values `[requests, length, heads, head_dim]`, each request's own block behind all others."""
        pages = self._pool.pages(layer)
        for page, new in zip(pages, (k, v), strict=True):
            page[singles.pages, singles.offsets] = new
        own = [page[singles.pages] for page in pages]
        if len(singles.filled):
            keys, values = (part[singles.filled] for part in own)
            self._pool.seal(layer, singles.own[singles.filled], keys, values)
        # What a former owner left in a page must not reach the answer: a weight of 0 times NaN is NaN.
        behind = torch.arange(self._pool.block_size) > singles.offsets[:, None]
        coded = self._pool.read(layer, singles.blocks.flatten())
        return [
            torch.cat((old.unflatten(0, (len(k), -1)), new.masked_fill(behind[:, :, None, None], 0.0)), 1)
            for old, new in zip(coded, own, strict=True)
        ]

    def _read_piece(self, layer: int, piece: _Piece, k: Tensor, v: Tensor) -> list[Tensor]:
        """Keys and values `[length, heads, head_dim]`: the blocks before the last as codes, behind them the tokens of
        this pass, and those before them in the first block, as they came."""
        page, held = piece.begun
        size, pages = self._pool.block_size, self._pool.pages(layer)
        came = [torch.cat((old[page, :held], new)) for old, new in zip(pages, (k, v), strict=True)]
        if count := len(piece.filled):
            keys, values = (part[: count * size].unflatten(0, (count, size)) for part in came)
            self._pool.seal(layer, piece.filled, keys, values)
        for target, start, length in piece.kept:
            for old, new in zip(pages, came, strict=True):
                old[target, :length] = new[start : start + length]
        coded = self._pool.read(layer, piece.blocks)
        return [torch.cat(parts) for parts in zip(coded, came, strict=True)]

    def _mask_of_singles(self, singles: _Singles, window: int | None) -> Tensor:
        """What is visible, `[requests, 1, 1, length]`."""
        size, starts, offsets = self._pool.block_size, singles.starts, singles.offsets[:, None]
        old, new = torch.arange(singles.blocks.shape[1] * size), torch.arange(size)
        visible = torch.cat((old < starts, new <= offsets), 1)
        if window is not None:
            positions = torch.cat((old.expand(len(starts), -1), starts + new), 1)
            visible &= positions > starts + offsets - window
        return visible[:, None, None]

    def _mask_of_piece(self, piece: _Piece, window: int | None) -> Tensor:
        """What is visible, `[queries, length]`."""
        size, one = self._pool.block_size, piece.work
        queries = torch.arange(one.start, one.end)[:, None]
        own = queries // size * size
        old, new = torch.arange(len(piece.blocks) * size), torch.arange(one.start - one.start % size, one.end)
        visible = torch.cat((old < own, (own <= new) & (new <= queries)), 1)
        if window is not None:
            visible &= torch.cat((old, new)) > queries - window
        return visible
