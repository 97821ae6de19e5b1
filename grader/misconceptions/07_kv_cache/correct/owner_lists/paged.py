"""Keys and values in one tensor, a Python list of layers; slots are written and read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import cached_attention


class PagedMemory:
    """`[2, num_blocks, block_size, kv_heads, head_dim]` for each layer."""

    def __init__(self, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> None:
        if num_blocks < 1 or block_size < 1 or not dtype.is_floating_point:
            raise ValueError("sizes are at least 1, and numbers floating point")
        self.config, self.num_blocks, self.block_size, self.dtype = config, num_blocks, block_size, dtype
        shape = (2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]

    def _layer(self, layer: int) -> Tensor:
        if layer not in range(len(self.layers)):
            raise ValueError(f"no layer {layer}")
        return self.layers[layer]

    def _place(self, slot: int) -> tuple[int, int]:
        block, offset = divmod(slot, self.block_size)
        if block not in range(self.num_blocks):
            raise ValueError(f"no slot {slot}")
        return block, offset

    def keys(self, layer: int) -> Tensor:
        """The first half."""
        return self._layer(layer)[0]

    def values(self, layer: int) -> Tensor:
        """The second half."""
        return self._layer(layer)[1]

    def check_new_tokens(self, layer: int, k: Tensor, v: Tensor, count: int) -> None:
        """Shapes and dtypes."""
        self._layer(layer)
        wanted = (1, self.config.num_kv_heads, count, self.config.head_dim)
        if count < 1 or any(tuple(t.shape) != wanted or t.dtype != self.dtype for t in (k, v)):
            raise ValueError(f"keys and values must have shape {wanted} in {self.dtype}")

    def write(self, layer: int, slots: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Token by token."""
        self.check_new_tokens(layer, k, v, len(slots))
        for token, (block, offset) in enumerate([self._place(slot) for slot in slots]):
            self.layers[layer][0, block, offset] = k[0, :, token]
            self.layers[layer][1, block, offset] = v[0, :, token]

    def gather(self, layer: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token by token."""
        memory = self._layer(layer)
        places = [self._place(slot) for slot in slots]
        keys, values = (torch.stack([half[b, o] for b, o in places], dim=1)[None] for half in memory)
        return keys, values

    def copy_block(self, source: int, target: int) -> None:
        """Layer by layer."""
        if source not in range(self.num_blocks) or target not in range(self.num_blocks):
            raise ValueError(f"no block {source} or {target}")
        for memory in self.layers:
            memory[:, target].copy_(memory[:, source])


def paged_attention(
    q: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    block_tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] = cached_attention,
) -> Tensor:
    """Cleans what lies behind a row's end, then gathers flat slots."""
    count, size = key_blocks.shape[:2]
    if len(block_tables) != q.shape[0] or len(lengths) != q.shape[0]:
        raise ValueError("a table and a length for each row")
    result = torch.empty_like(q)
    for row, (table, length) in enumerate(zip(block_tables, lengths, strict=True)):
        if length < 1 or not 0 <= len(table) * size - length < size or any(b not in range(count) for b in table):
            raise ValueError(f"row {row}: table {list(table)} doesn't fit {length} tokens")
        slots = torch.tensor([table[p // size] * size + p % size for p in range(length)])
        k = key_blocks.reshape(count * size, *key_blocks.shape[2:])[slots].permute(1, 0, 2)[None]
        v = value_blocks.reshape(count * size, *value_blocks.shape[2:])[slots].permute(1, 0, 2)[None]
        result[row] = attention(q[row][None], k, v)[0]
    return result
