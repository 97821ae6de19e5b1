"""The judge's own block allocator: a dict of owners, and a record of who was freed."""

from __future__ import annotations

from labkit.scripted_pool import ScriptedPool


class RecordingPool:
    """Hands out blocks, the highest id first, and counts their owners.

    Args:
        num_blocks: size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.owners = dict.fromkeys(range(num_blocks), 0)

    def spec(self) -> ScriptedPool:
        """The argument to pass to the lab in place of an allocator."""
        return ScriptedPool(
            len(self.owners), self.num_free, self.allocate, self.share, self.free, self.owners.__getitem__
        )

    def num_free(self) -> int:
        """Blocks without an owner."""
        return sum(count == 0 for count in self.owners.values())

    def allocate(self, count: int = 1) -> list[int]:
        """Take free blocks; ValueError if there are too few."""
        free = [block for block, owners in self.owners.items() if owners == 0]
        if count > len(free):
            raise ValueError(f"{count} blocks were asked of the allocator, but only {len(free)} are free")
        taken = free[len(free) - count :][::-1]
        self.owners.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, block: int) -> None:
        """One more owner; ValueError if there is none yet."""
        self._check(block, "shared")
        self.owners[block] += 1

    def free(self, block: int) -> None:
        """One owner less; ValueError if there is none."""
        self._check(block, "freed")
        self.owners[block] -= 1

    def _check(self, block: int, what: str) -> None:
        if self.owners.get(block, 0) == 0:
            raise ValueError(f"block {block} has no owner, but it was to be {what}")
