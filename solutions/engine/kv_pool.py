"""The memory behind the block ids: what every layer keeps of its tokens, and the moves between pool and host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from .kv_manager import Move, MoveKind


@dataclass(frozen=True)
class KVShape:
    """What a model keeps of each token, in each layer.

    Args:
        num_layers: that keep anything.
        num_parts: tensors side by side: 2 for keys and values, 1 for a latent that both are made from.
        num_heads: heads in a part.
        head_dim: numbers in a head.
    """

    num_layers: int
    num_parts: int
    num_heads: int
    head_dim: int


class KVPool:
    """What layers keep of their tokens, in blocks, allocated once.

    Args:
        kv_shape: of the model.
        num_blocks: blocks in each layer.
        block_size: tokens in a block.
        num_host_blocks: blocks in host memory, for requests that are swapped out.
        dtype: type of the stored numbers.
    """

    def __init__(
        self, kv_shape: KVShape, num_blocks: int, block_size: int, num_host_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        # Parts side by side, tokens before heads: a token is written in one piece, a block is one range.
        shape = (
            kv_shape.num_layers, kv_shape.num_parts, num_blocks, block_size, kv_shape.num_heads, kv_shape.head_dim
        )  # fmt: skip
        self._blocks = torch.zeros(shape, dtype=dtype)
        self._host = torch.zeros((*shape[:2], num_host_blocks, *shape[3:]), dtype=dtype)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool, host memory not counted."""
        return self._blocks.numel() * self._blocks.element_size()

    def write(self, layer: int, slots: Tensor, *parts: Tensor) -> None:
        """Stores new tokens.

        Args:
            layer: 0 for the first.
            slots: int64 `[tokens]`.
            parts: as many as `KVShape.num_parts`, each `[tokens, heads, head_dim]`; keys come before values.
        """
        for memory, part in zip(self._blocks[layer].flatten(1, 2), parts, strict=True):
            memory[slots] = part

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, ...]:
        """What whole blocks hold.

        Args:
            layer: 0 for the first.
            blocks: ids, int64 `[..., blocks]`.

        Returns:
            For each part `[..., blocks * block_size, heads, head_dim]`.
        """
        return tuple(memory[blocks].flatten(-4, -3) for memory in self._blocks[layer])

    def move(self, moves: Sequence[Move]) -> None:
        """Makes the moves of a step, in order."""
        for kind, group in groupby(moves, key=lambda move: move.kind):
            if kind is MoveKind.COPY:  # one by one: a copy's target may be the next one's source
                for move in group:
                    self._blocks[:, :, move.target] = self._blocks[:, :, move.source]
                continue
            pairs = list(group)
            sources, targets = [move.source for move in pairs], [move.target for move in pairs]
            if kind is MoveKind.OUT:
                self._host[:, :, targets] = self._blocks[:, :, sources]
            else:
                self._blocks[:, :, targets] = self._host[:, :, sources]
