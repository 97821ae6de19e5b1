"""Task 12c: a block table that gives blocks back when everything in them has left the window."""

from __future__ import annotations

from labkit.checks import check_count

from .block_table import BlockTable
from .blocks import BlockPool


class WindowedBlockTable:
    """The blocks of one sequence in a layer with a window, or in layers that all have the same.

    It is a block table of task 7 without its front: token i lies where that table has token `i - start`. Blocks are
    given back whole, so `start` is a multiple of the block size, and a sequence holds at most one block more than its
    window and the new tokens of a pass need, however long it gets.

    Args:
        pool: where blocks come from.
        block_size: tokens in a block.
        window: tokens that a query sees, its own included.

    Raises:
        ValueError: `block_size` or `window` is not an int of at least 1.
    """

    def __init__(self, pool: BlockPool, block_size: int, window: int) -> None:
        check_count("window", window, 1)
        self._pool = pool
        self._block_size = block_size
        self._window = window
        self._table = BlockTable(pool, block_size)
        self._start = 0

    @property
    def start(self) -> int:
        """Position of the first token that is still held."""
        return self._start

    @property
    def length(self) -> int:
        """Tokens in the sequence, held or given back."""
        # BEGIN SOLUTION
        return self._start + self._table.length
        # END SOLUTION

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks held, in order."""
        return self._table.blocks

    def slots(self) -> list[int]:
        """Slots of the tokens from position `start` on, in order."""
        return self._table.slots()

    def append(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Make room for new tokens, and give back the blocks of which no new token sees anything.

        The new tokens see each other and the last window - 1 before them: those stay, even where the next pass won't
        see them any more.

        Args:
            count: new tokens, at least 1.

        Returns:
            Slots of the new tokens and copies to make, as `BlockTable.append`.

        Raises:
            OutOfBlocks: the pool can't give the blocks needed, before any is given back. Nothing has changed then.
            ValueError: `count` is no int of at least 1.
        """
        # BEGIN SOLUTION
        seen_from = max(0, self.length - self._window + 1)
        slots, copies = self._table.append(count)
        self._give_back((seen_from - self._start) // self._block_size)
        return slots, copies
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`, if what the next one sees is still held; 0 is always possible.

        Raises:
            ValueError: `length` is no int from 0 to the present length, or tokens that the next one sees were given
                back; the message says how far back is possible. Nothing has changed then.
        """
        check_count("length", length, 0)
        # BEGIN SOLUTION
        least = self._start + self._window - 1 if self._start else 0
        if length > self.length or 0 < length < least:
            raise ValueError(f"can truncate to 0, or to {least} up to {self.length} tokens, not to {length}")
        if length == 0:
            self._start = 0
        self._table.truncate(length - self._start)
        # END SOLUTION

    def fork(self) -> WindowedBlockTable:
        """A second sequence with the same tokens so far, in the same blocks; both go on independently."""
        # BEGIN SOLUTION
        other = WindowedBlockTable(self._pool, self._block_size, self._window)
        other._table, other._start = self._table.fork(), self._start
        return other
        # END SOLUTION

    def free(self) -> None:
        """Give up every block; the table is empty then and can be used again."""
        self.truncate(0)

    # BEGIN SOLUTION
    def _give_back(self, num_blocks: int) -> None:
        """Go on with a table of all blocks but the first."""
        if num_blocks == 0:
            return
        rest = BlockTable(self._pool, self._block_size)
        kept = self._table.blocks[num_blocks:]
        for block in kept:
            self._pool.share(block)
        rest.adopt(kept)
        rest.truncate(self._table.length - num_blocks * self._block_size)
        self._table.free()
        self._table = rest
        self._start += num_blocks * self._block_size

    # END SOLUTION
