"""A dict of owned blocks only; free ones are whatever isn't in it."""

from __future__ import annotations

from typing import Any

BlockPool = Any


class OutOfBlocks(ValueError):
    """Too few."""


class BlockAllocator:
    """Gives out the highest free ids first."""

    def __init__(self, num_blocks: int) -> None:
        if type(num_blocks) is not int or num_blocks < 1:
            raise ValueError(f"a pool has at least one block, not {num_blocks!r}")
        self.num_blocks = num_blocks
        self.owned: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """What isn't owned."""
        return self.num_blocks - len(self.owned)

    def ref_count(self, block: int) -> int:
        """0 if not owned."""
        if block not in range(self.num_blocks):
            raise ValueError(f"no block {block}")
        return self.owned.get(block, 0)

    def allocate(self, count: int = 1) -> list[int]:
        """From the top."""
        if type(count) is not int or count < 0:
            raise ValueError(f"can't give {count!r} blocks")
        free = [block for block in reversed(range(self.num_blocks)) if block not in self.owned]
        if len(free) < count:
            raise OutOfBlocks(f"{count} is more than {len(free)}")
        self.owned.update((block, 1) for block in free[:count])
        return free[:count]

    def share(self, block: int) -> None:
        """One more."""
        if self.ref_count(block) == 0:
            raise ValueError(f"{block} is nobody's")
        self.owned[block] += 1

    def free(self, block: int) -> None:
        """One less."""
        left = self.ref_count(block) - 1
        if left < 0:
            raise ValueError(f"{block} is nobody's")
        if left:
            self.owned[block] = left
        else:
            del self.owned[block]
