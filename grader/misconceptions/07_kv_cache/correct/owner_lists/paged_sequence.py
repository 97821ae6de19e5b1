"""Takes slots ahead of the pass's first layer in a list of its own, and copies the past out block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .block_table import BlockTable


class PagedSequence:
    """Counts tokens by layer in a dict."""

    def __init__(self, memory: Any, pool: Any, prefix: Sequence[int] = (), table: BlockTable | None = None) -> None:
        self.memory, self.pool = memory, pool
        self.table = table if table is not None else BlockTable(pool, memory.block_size)
        if prefix:
            self.table.adopt(list(prefix))
        self.done = dict.fromkeys(range(memory.config.num_layers), self.table.length)

    @property
    def length(self) -> int:
        """Of the slowest layer."""
        return min(self.done.values())

    @property
    def capacity(self) -> int:
        """The table's."""
        return self.table.capacity

    @property
    def blocks(self) -> list[int]:
        """The table's."""
        return self.table.blocks

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes, then reads block by block."""
        config = self.memory.config
        if layer not in self.done:
            raise ValueError(f"no layer {layer}")
        for tensor in (k, v):
            wanted = (1, config.num_kv_heads, k.shape[2], config.head_dim)
            if tuple(tensor.shape) != wanted or tensor.dtype != self.memory.dtype:
                raise ValueError(f"{list(tensor.shape)} in {tensor.dtype} doesn't fit")
        missing = self.done[layer] + k.shape[2] - self.table.length
        if missing > 0:
            for pair in self.table.append(missing)[1]:
                self.memory.copy_block(*pair)
        slots = self.table.slots()
        self.memory.write(layer, slots[self.done[layer] :][: k.shape[2]], k, v)
        self.done[layer] += k.shape[2]
        result = []
        for blocks in (self.memory.keys(layer), self.memory.values(layer)):
            pieces = torch.cat([blocks[block] for block in self.table.blocks])
            result.append(pieces[: self.done[layer]].permute(1, 0, 2)[None])
        return result[0], result[1]

    def truncate(self, length: int) -> None:
        """Table and counts."""
        if type(length) is not int or not 0 <= length <= self.length:
            raise ValueError(f"can't cut {self.length} tokens to {length!r}")
        self.table.truncate(length)
        self.done = dict.fromkeys(self.done, length)

    def fork(self) -> PagedSequence:
        """On a forked table."""
        return PagedSequence(self.memory, self.pool, (), self.table.fork())

    def free(self) -> None:
        """Cut to nothing."""
        self.truncate(0)
