"""Asks the prefixes for everything, and counts what it owns by looking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.checks import check_tokens

from .blocks import OutOfBlocks
from .radix import RadixTree


class RadixCache:
    """One reference to each block of the tree."""

    def __init__(self, allocator: Any, block_size: int) -> None:
        self.tree = RadixTree(block_size)
        self.allocator, self.size = allocator, block_size
        self.mine: list[int] = []

    @property
    def num_cached(self) -> int:
        """All in the tree."""
        return self.tree.num_blocks

    @property
    def num_free(self) -> int:
        """Now and after eviction."""
        return int(self.allocator.num_free) + self.tree.num_evictable(lambda block: self.ref_count(block) < 2)

    def match(
        self, tokens: Sequence[int], adapter: str | None = None, salt: str | None = None
    ) -> tuple[list[int], int]:
        """All tokens but one."""
        front = check_tokens("prompt", tokens)[:-1]
        blocks, length = self.tree.match(front, (adapter, salt))
        for block in blocks:
            self.share(block)
        self.tree.touch(front, (adapter, salt))
        return blocks, length

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], adapter: str | None = None, salt: str | None = None
    ) -> int:
        """Looks first at what would be taken."""
        ids = check_tokens("tokens", tokens)
        length = self.tree.match(ids, (adapter, salt))[1]
        whole = length // self.size * self.size
        new = [] if length == len(ids) else list(blocks[length // self.size : -(-len(ids) // self.size)])
        tails = [self.tree.block_of.get(((adapter, salt), tuple(ids[:end]))) for end in range(whole + 1, length + 1)]
        others = set(self.mine) - ({new[0]} & set(tails) if new else set())
        if len(set(new)) < len(new) or set(new) & others or any(self.ref_count(block) < 1 for block in new):
            raise ValueError(f"some of the blocks {new} are free, named twice or cached for another text")
        taken, given_up = self.tree.insert(ids, blocks, (adapter, salt))
        for block in taken:
            self.share(block)
        self.mine += taken
        self._lose(given_up)
        return len(taken)

    def _lose(self, blocks: list[int]) -> None:
        for block in blocks:
            self.mine.remove(block)
            self.free(block)

    def evict(self, count: int) -> int:
        """As the tree says."""
        gone = self.tree.evict(count, lambda block: self.ref_count(block) < 2)
        self._lose(gone)
        return len(gone)

    def allocate(self, count: int = 1) -> list[int]:
        """Makes room first."""
        if type(count) is not int or count < 0:
            raise ValueError(f"can't give {count!r} blocks")
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks are more than can be had")
        while self.allocator.num_free < count:
            self.evict(1)
        return list(self.allocator.allocate(count))

    def share(self, block: int) -> None:
        """The allocator's."""
        self.allocator.share(block)

    def free(self, block: int) -> None:
        """The allocator's."""
        self.allocator.free(block)

    def ref_count(self, block: int) -> int:
        """The allocator's."""
        return int(self.allocator.ref_count(block))
