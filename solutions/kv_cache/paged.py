"""Task 7c: keys and values in blocks, and attention that gathers them through block tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.config import ModelConfig

from .attention import cached_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class PagedMemory:
    """Keys and values of all sequences, in memory that is allocated once and divided into blocks.

    It knows no sequences: which block belongs to whom is the block tables' business. Slot s is offset
    `s % block_size` of block `s // block_size`, the same in every layer.

    Args:
        config: shape of the model.
        num_blocks: blocks in each layer.
        block_size: tokens in a block.
        dtype: type of the stored numbers.

    Raises:
        ValueError: a size is not an int of at least 1, or `dtype` is not floating point.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        check_count("num_blocks", num_blocks, 1)
        check_count("block_size", block_size, 1)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point, got {dtype}")
        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        # Tokens before heads: the slots of a block lie side by side, so that a token is written in one piece.
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype)
        self._values = torch.zeros(shape, dtype=dtype)

    def keys(self, layer: int) -> Tensor:
        """All blocks of a layer's keys, used or not: a view `[num_blocks, block_size, kv_heads, head_dim]`.

        Raises:
            ValueError: there is no such layer.
        """
        self._check_layer(layer)
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """All blocks of a layer's values; as `keys`."""
        self._check_layer(layer)
        return self._values[layer]

    def write(self, layer: int, slots: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Store keys and values of new tokens.

        Args:
            layer: 0 for the first decoder layer.
            slots: one for each token.
            k: keys `[1, kv_heads, tokens, head_dim]` in the memory's dtype.
            v: values, same shape and dtype.

        Raises:
            ValueError: layer, a slot, shape or dtype is wrong. Nothing is written then.
        """
        self._check_slots(slots)
        self.check_new_tokens(layer, k, v, len(slots))
        # BEGIN SOLUTION
        index = torch.tensor(slots, dtype=torch.int64)
        for memory, new in ((self._keys, k), (self._values, v)):
            memory[layer].flatten(0, 1)[index] = new[0].transpose(0, 1)
        # END SOLUTION

    def gather(self, layer: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, from wherever they lie.

        Args:
            layer: 0 for the first decoder layer.
            slots: of the sequence's tokens, in order.

        Returns:
            Two tensors `[1, kv_heads, len(slots), head_dim]`.

        Raises:
            ValueError: there is no such layer or slot.
        """
        self._check_layer(layer)
        self._check_slots(slots)
        # BEGIN SOLUTION
        index = torch.tensor(slots, dtype=torch.int64)
        keys, values = (t[layer].flatten(0, 1)[index].transpose(0, 1) for t in (self._keys, self._values))
        return keys.unsqueeze(0), values.unsqueeze(0)
        # END SOLUTION

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values in every layer.

        Raises:
            ValueError: there is no such block.
        """
        for block in (source, target):
            if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < self.num_blocks:
                raise ValueError(f"a block must be an int from 0 to {self.num_blocks - 1}, got {block!r}")
        # BEGIN SOLUTION
        for memory in (self._keys, self._values):
            memory[:, target] = memory[:, source]
        # END SOLUTION

    def check_new_tokens(self, layer: int, k: Tensor, v: Tensor, count: int) -> None:
        """Refuse keys or values that couldn't be written to `count` slots of a layer.

        Raises:
            ValueError: layer, shape or dtype is wrong, or `count` is no int of at least 1.
        """
        self._check_layer(layer)
        check_count("new tokens", count, 1)
        wanted = (1, self.config.num_kv_heads, count, self.config.head_dim)
        for name, tensor in (("k", k), ("v", v)):
            if tuple(tensor.shape) != wanted or tensor.dtype != self.dtype:
                raise ValueError(
                    f"{name} must be {self.dtype} of shape {list(wanted)}, got {tensor.dtype} {list(tensor.shape)}"
                )

    def _check_layer(self, layer: int) -> None:
        """Refuse a layer that the model doesn't have."""
        count = self.config.num_layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise ValueError(f"layer must be an int from 0 to {count - 1}, got {layer!r}")

    def _check_slots(self, slots: Sequence[int]) -> None:
        """Refuse slots outside the memory; a negative one would count from the end."""
        most = self.num_blocks * self.block_size
        for slot in slots:
            if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < most:
                raise ValueError(f"a slot must be an int from 0 to {most - 1}, got {slot!r}")


def paged_attention(
    q: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    block_tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    attention: Attention = cached_attention,
) -> Tensor:
    """Causal attention of a batch whose keys and values lie in blocks.

    Args:
        q: queries of the newest tokens `[batch, heads, num_queries, head_dim]`.
        key_blocks: all blocks of a layer `[num_blocks, block_size, kv_heads, head_dim]`.
        value_blocks: same shape.
        block_tables: for each row its blocks in order, exactly as many as its length needs.
        lengths: tokens of each row, its new ones included. What lies behind them in the last block, or in blocks
            that no row names, may be anything, NaN too.
        attention: attention of one sequence, called as `attention(q, k, v)`.

    Returns:
        `[batch, heads, num_queries, head_dim]` in q's dtype.

    Raises:
        ValueError: not one table and one length for each row, or a table that doesn't fit its length.
    """
    if not len(q) == len(block_tables) == len(lengths):
        raise ValueError(f"{len(q)} rows of queries, {len(block_tables)} tables and {len(lengths)} lengths")
    for row, blocks in enumerate(block_tables):
        check_count(f"lengths[{row}]", lengths[row], 1)
        if len(blocks) != -(-lengths[row] // key_blocks.shape[1]):
            raise ValueError(f"row {row}: {lengths[row]} tokens don't need the {len(blocks)} blocks of its table")
        if any(not 0 <= block < len(key_blocks) for block in blocks):
            raise ValueError(f"row {row}: its table {list(blocks)} names a block outside 0 … {len(key_blocks) - 1}")
    # BEGIN SOLUTION
    rows = []
    for row, (table, length) in enumerate(zip(block_tables, lengths, strict=True)):
        # Cut before attending: a weight of 0 on what lies behind the last token would still turn its NaN into NaN.
        keys, values = (
            memory[list(table)].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
            for memory in (key_blocks, value_blocks)
        )
        rows.append(attention(q[row : row + 1], keys, values))
    return torch.cat(rows)
    # END SOLUTION
