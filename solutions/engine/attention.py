"""Attention of one step over paged keys and values: single tokens in one batch, longer pieces one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_pool import KVPool
from .step import Work


@dataclass(frozen=True)
class _Piece:
    """Several tokens of one request: where they stand in the pass, its blocks, and its length with them."""

    first: int
    count: int
    blocks: Tensor
    length: int


class PagedAttention:
    """Stores the new keys and values of a step, and lets each query read its own request's, up to itself.

    Requests that compute a single token are padded to the longest of them and attend together; what lies behind a
    request's end is masked. Longer pieces attend one after the other, against keys that are theirs alone.

    Args:
        pool: the memory.
        work: of the step, in the order of its tokens.
    """

    def __init__(self, pool: KVPool, work: tuple[Work, ...]) -> None:
        self._pool = pool
        self._slots = torch.tensor([slot for one in work for slot in one.slots])
        self._pieces: list[_Piece] = []
        singles: list[tuple[int, Work]] = []
        first = 0
        for one in work:
            if len(one.tokens) == 1:
                singles.append((first, one))
            else:
                self._pieces.append(_Piece(first, len(one.tokens), torch.tensor(one.blocks), one.end))
            first += len(one.tokens)
        self._single_rows = torch.tensor([row for row, _ in singles], dtype=torch.int64)
        if singles:
            most = max(len(one.blocks) for _, one in singles)
            # Padding repeats the first block: it exists, and is masked.
            self._tables = torch.tensor(
                [[*one.blocks, *one.blocks[:1] * (most - len(one.blocks))] for _, one in singles]
            )
            ends = torch.tensor([one.end for _, one in singles])
            self._hidden = torch.arange(most * pool.block_size) >= ends[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `PackedAttention`."""
        self._pool.write(layer, self._slots, k, v)
        out = torch.empty_like(q)
        if len(self._single_rows):
            out[self._single_rows] = self._singles(layer, q[self._single_rows])
        for piece in self._pieces:
            rows = slice(piece.first, piece.first + piece.count)
            out[rows] = self._piece(layer, q[rows], piece)
        return out

    def _singles(self, layer: int, q: Tensor) -> Tensor:
        """`[requests, heads, head_dim]`, one query each."""
        keys, values = self._pool.read(layer, self._tables)
        # Whatever a masked slot holds must not reach the answer: a weight of 0 times NaN is NaN.
        values = values.masked_fill(self._hidden[:, :, None, None], 0.0)
        keys = keys.masked_fill(self._hidden[:, :, None, None], 0.0)
        read = F.scaled_dot_product_attention(
            q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), ~self._hidden[:, None, None], enable_gqa=True
        )
        return read[:, :, 0]

    def _piece(self, layer: int, q: Tensor, piece: _Piece) -> Tensor:
        """`[count, heads, head_dim]`: query i sees all keys but the last `count - 1 - i`."""
        keys, values = (memory[: piece.length] for memory in self._pool.read(layer, piece.blocks))
        positions = torch.arange(piece.length)
        visible = positions <= positions[piece.length - piece.count :, None]
        read = F.scaled_dot_product_attention(
            q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), visible, enable_gqa=True
        )
        return read.transpose(0, 1)
