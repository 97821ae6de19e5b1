"""The memory behind the block ids: keys and values of every layer, and the moves between pool and host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from labkit.config import ModelConfig

from .kv_manager import Move, MoveKind


class KVPool:
    """Keys and values in blocks, allocated once.

    Args:
        config: sizes of the model.
        num_blocks: blocks in each layer.
        block_size: tokens in a block.
        num_host_blocks: blocks in host memory, for requests that are swapped out.
        dtype: type of the stored numbers.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, num_host_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        # Keys and values side by side, tokens before heads: a token is written in one piece, a block is one range.
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self._blocks = torch.zeros(shape, dtype=dtype)
        self._host = torch.zeros((*shape[:2], num_host_blocks, *shape[3:]), dtype=dtype)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool, host memory not counted."""
        return self._blocks.numel() * self._blocks.element_size()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores new tokens.

        Args:
            layer: 0 for the first.
            slots: int64 `[tokens]`.
            k: keys `[tokens, kv_heads, head_dim]`.
            v: values, in the same shape.
        """
        keys, values = self._blocks[layer].flatten(1, 2)
        keys[slots] = k
        values[slots] = v

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks.

        Args:
            layer: 0 for the first.
            blocks: ids, int64 `[..., blocks]`.

        Returns:
            Two tensors `[..., blocks * block_size, kv_heads, head_dim]`.
        """
        keys, values = (memory[blocks].flatten(-4, -3) for memory in self._blocks[layer])
        return keys, values

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
