"""Task 7b: where each token of a sequence lies, block by block."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.checks import check_count

from .blocks import BlockPool


class BlockTable:
    """The physical blocks of one sequence, in the order of its tokens.

    Token i lies in block `blocks[i // block_size]`, at offset `i % block_size`; its *slot* is
    `block * block_size + offset`. Only the last block may be partly filled. The table owns one reference to each of
    its blocks. A block with other owners is never written to: it is copied first (copy-on-write).

    Args:
        pool: where blocks come from.
        block_size: tokens in a block.

    Raises:
        ValueError: `block_size` is not an int of at least 1.

    Source: Kwon et al. 2023 (2309.06180); module section 2.2.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        check_count("block_size", block_size, 1)
        self._pool = pool
        self._block_size = block_size
        self._blocks: list[int] = []
        self._length = 0

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks, a copy."""
        return list(self._blocks)

    @property
    def length(self) -> int:
        """Tokens in the sequence."""
        return self._length

    @property
    def capacity(self) -> int:
        """The length that the sequence could reach with the blocks that are free now."""
        # BEGIN SOLUTION
        room = len(self._blocks) + self._pool.num_free - self._must_copy_last()
        # Without a block for the copy the sequence can't grow, and stays what it is.
        return max(self._length, room * self._block_size)
        # END SOLUTION

    def slots(self) -> list[int]:
        """Slots of all tokens, in order."""
        # BEGIN SOLUTION
        return self._slots_from(0)
        # END SOLUTION

    def append(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Make room for new tokens.

        A new block is taken exactly when a token falls at a position that is a multiple of `block_size`. If the
        last block has room left and other owners, a copy takes its place first.

        Args:
            count: new tokens, at least 1.

        Returns:
            The slots of the new tokens, in order; and the copies to make before anything is written to them, pairs
            of (source block, target block): at most one.

        Raises:
            OutOfBlocks: the pool can't give the blocks needed. Neither table nor pool has changed then.
            ValueError: `count` is no int of at least 1.
        """
        check_count("count", count, 1)
        # BEGIN SOLUTION
        must_copy = self._must_copy_last()
        wanted = -(-(self._length + count) // self._block_size)
        new = self._pool.allocate(wanted - len(self._blocks) + must_copy)
        copies = []
        if must_copy:
            source, target = self._blocks.pop(), new.pop()
            self._pool.free(source)
            self._blocks.append(target)
            copies.append((source, target))
        self._blocks += new
        self._length += count
        return self._slots_from(self._length - count), copies
        # END SOLUTION

    def adopt(self, blocks: Sequence[int]) -> None:
        """Start the sequence with full blocks that hold its first tokens already.

        Args:
            blocks: for each the caller hands over a reference of its own, such as those that a prefix cache's
                `match` took; the table frees them in the end.

        Raises:
            ValueError: the table isn't empty. It owns nothing new then.
        """
        # BEGIN SOLUTION
        if self._blocks:
            raise ValueError(f"only an empty table can adopt blocks; this one holds {self._length} tokens")
        self._blocks = list(blocks)
        self._length = len(self._blocks) * self._block_size
        # END SOLUTION

    def fork(self) -> BlockTable:
        """A second sequence with the same tokens so far, in the same blocks; both go on independently."""
        # BEGIN SOLUTION
        other = BlockTable(self._pool, self._block_size)
        for block in self._blocks:
            self._pool.share(block)
        other._blocks, other._length = list(self._blocks), self._length
        return other
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`, and free the blocks that hold none of them.

        Raises:
            ValueError: `length` is no int from 0 to the present length. The table is then as it was.
        """
        check_count("length", length, 0)
        # BEGIN SOLUTION
        if length > self._length:
            raise ValueError(f"length must be at most the {self._length} tokens of the sequence, got {length}")
        kept = -(-length // self._block_size)
        # The last block first: what a prefix was built on outlives what was built on it.
        while len(self._blocks) > kept:
            self._pool.free(self._blocks.pop())
        self._length = length
        # END SOLUTION

    def free(self) -> None:
        """Give up every block; the table is empty then and can be used again."""
        # BEGIN SOLUTION
        self.truncate(0)
        # END SOLUTION

    # BEGIN SOLUTION
    def _slots_from(self, first: int) -> list[int]:
        """Slots of the tokens from one on; those before it, however many, cost nothing."""
        size = self._block_size
        return [self._blocks[i // size] * size + i % size for i in range(first, self._length)]

    def _must_copy_last(self) -> bool:
        """Whether the next token would be written into a block that others own, too."""
        return self._length % self._block_size != 0 and self._pool.ref_count(self._blocks[-1]) > 1

    # END SOLUTION
