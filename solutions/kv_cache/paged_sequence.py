"""Task 7d: one sequence in paged memory, behind the interface of the plain cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labkit.checks import check_count

from .block_table import BlockTable
from .blocks import BlockPool
from .paged import PagedMemory


class PagedSequence:
    """A KV store for one sequence whose keys and values lie in blocks of a shared memory.

    It can stand wherever a `KVCache` of batch size 1 can. As there, a forward pass appends its new tokens layer by
    layer, first layer first, and `length` is what every layer holds.

    Args:
        memory: where keys and values lie.
        pool: hands out the blocks of that memory.
        prefix: full blocks that hold the first tokens already; the sequence takes over the caller's references.
    """

    def __init__(self, memory: PagedMemory, pool: BlockPool, prefix: Sequence[int] = ()) -> None:
        self._memory = memory
        self._pool = pool
        self._table = BlockTable(pool, memory.block_size)
        self._table.adopt(prefix)
        self._held = [self._table.length] * memory.config.num_layers

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return min(self._held)

    @property
    def capacity(self) -> int:
        """The length that the sequence could reach with the blocks that are free now."""
        return self._table.capacity

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks that hold the sequence, in order."""
        return self._table.blocks

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens behind those that the layer holds.

        Args:
            layer: 0 for the first decoder layer.
            k: keys `[1, kv_heads, new_tokens, head_dim]`.
            v: values, same shape.

        Returns:
            Keys and values of all tokens that the layer now holds, `[1, kv_heads, tokens, head_dim]`.

        Raises:
            OutOfBlocks: the pool can't give the blocks needed. Nothing has changed then.
            ValueError: layer, shape or dtype is wrong. Nothing has changed then.
        """
        self._memory.check_new_tokens(layer, k, v, k.shape[2] if k.dim() == 4 else 0)
        # BEGIN SOLUTION
        # The first layer of a pass takes the slots, and the copies it calls for hold all layers; the others follow.
        start, end = self._held[layer], self._held[layer] + k.shape[2]
        if end > self._table.length:
            _, copies = self._table.append(end - self._table.length)
            for source, target in copies:
                self._memory.copy_block(source, target)
        slots = self._table.slots()
        self._memory.write(layer, slots[start:end], k, v)
        self._held[layer] = end
        return self._memory.gather(layer, slots[:end])
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`, in every layer, and free the blocks that hold none of them.

        Raises:
            ValueError: `length` is no int from 0 to the present length. Nothing has changed then.
        """
        check_count("length", length, 0)
        # BEGIN SOLUTION
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens held, got {length}")
        self._table.truncate(length)
        self._held = [length] * len(self._held)
        # END SOLUTION

    def fork(self) -> PagedSequence:
        """A second sequence with the same tokens so far, in the same blocks. Call it between passes."""
        # BEGIN SOLUTION
        other = PagedSequence(self._memory, self._pool)
        other._table, other._held = self._table.fork(), list(self._held)
        return other
        # END SOLUTION

    def free(self) -> None:
        """Give up every block."""
        self.truncate(0)
