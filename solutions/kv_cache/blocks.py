"""Task 7a: a pool of equal blocks, and how many owners each of them has."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from labkit.checks import check_count


class OutOfBlocks(ValueError):
    """The pool has too few free blocks. Nothing was changed: free something, then ask again."""


class BlockPool(Protocol):
    """Whoever hands out blocks: the allocator itself, or a prefix cache in front of it."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""

    def allocate(self, count: int = 1) -> list[int]:
        """Takes blocks for a new owner."""

    def share(self, block: int) -> None:
        """Adds an owner to a block."""

    def free(self, block: int) -> None:
        """Takes an owner from a block."""

    def ref_count(self, block: int) -> int:
        """Owners of a block."""


class BlockAllocator:
    """Hands out the ids of physical blocks and counts their owners.

    Each owner of a block holds one reference to it. A block with no owner is free, and free blocks are the only
    ones that are handed out: free blocks and blocks in use always add up to the pool.

        allocate ──► 1 owner ──share──► 2 owners ──free──► 1 owner ──free──► free

    Args:
        num_blocks: size of the pool; ids run from 0 to `num_blocks - 1`, all of them usable.

    Raises:
        ValueError: `num_blocks` is not an int of at least 1.

    Source: Kwon et al. 2023 (2309.06180); module section 2.2.
    """

    def __init__(self, num_blocks: int) -> None:
        check_count("num_blocks", num_blocks, 1)
        self._num_blocks = num_blocks
        # BEGIN SOLUTION
        self._owners = [0] * num_blocks
        self._free = deque(range(num_blocks))
        # END SOLUTION

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        # BEGIN SOLUTION
        return len(self._free)
        # END SOLUTION

    def ref_count(self, block: int) -> int:
        """Owners of a block, 0 for a free one.

        Raises:
            ValueError: there is no such block.
        """
        self._check_block(block)
        # BEGIN SOLUTION
        return self._owners[block]
        # END SOLUTION

    def allocate(self, count: int = 1) -> list[int]:
        """Take free blocks; each gets its first owner.

        Args:
            count: how many; 0 is allowed.

        Returns:
            Their ids, all different.

        Raises:
            OutOfBlocks: fewer than `count` are free. None is taken then.
            ValueError: `count` is no int of at least 0.
        """
        check_count("count", count, 0)
        # BEGIN SOLUTION
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks were asked for, but only {self.num_free} of {self._num_blocks} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks
        # END SOLUTION

    def share(self, block: int) -> None:
        """Give a block one more owner.

        Raises:
            ValueError: there is no such block, or it is free: only what somebody owns can be shared.
        """
        self._check_block(block)
        # BEGIN SOLUTION
        self._check_owned(block, "shared")
        self._owners[block] += 1
        # END SOLUTION

    def free(self, block: int) -> None:
        """Take one owner from a block; without its last owner it is free.

        Raises:
            ValueError: there is no such block, or it is free already.
        """
        self._check_block(block)
        # BEGIN SOLUTION
        self._check_owned(block, "freed")
        self._owners[block] -= 1
        if self._owners[block] == 0:
            self._free.append(block)
        # END SOLUTION

    def _check_block(self, block: int) -> None:
        """Refuse what is no id of this pool."""
        if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < self._num_blocks:
            raise ValueError(f"block must be an int from 0 to {self._num_blocks - 1}, got {block!r}")

    # BEGIN SOLUTION
    def _check_owned(self, block: int, what: str) -> None:
        """Refuse a free block."""
        if self._owners[block] == 0:
            raise ValueError(f"block {block} is free, so it can't be {what}; somebody counts its owners wrongly")

    # END SOLUTION
