"""The pool as requests see it: what they hold is counted as it changes, so that nobody has to look for what is left."""

from __future__ import annotations

from typing import Protocol

from solutions.kv_cache.blocks import BlockPool, OutOfBlocks

_PARTS_OF_POOL = 64
"""Eviction takes one part in so many at once. It has to step over whatever is in use, and so looks at no more than 64
blocks for each that it finds, as long as it finds any."""


class Cache(Protocol):
    """A prefix cache, as far as eviction goes."""

    def evict(self, count: int) -> int:
        """Forgets up to `count` blocks that nobody uses; returns how many."""


class HeldBlocks:
    """A pool in front of another, in which asking how many blocks there are costs nothing.

    Lab 07's caches answer that by going through all they keep: they know no requests. Requests hold whole prefixes. Who
    holds a cached block holds all those that it was built on, and then what no request holds can be had:

        num_free = blocks of the pool − blocks that requests hold

    A request must not let the cache build one of its blocks on somebody else's: see `KVManager.remember`.

    Args:
        pool: whoever hands out blocks, the allocator or a cache in front of it.
        allocator: the allocator itself.
        num_blocks: of the pool.
        cache: what can be evicted; None without a cache.
    """

    def __init__(self, pool: BlockPool, allocator: BlockPool, num_blocks: int, cache: Cache | None) -> None:
        self._pool = pool
        self._allocator = allocator
        self._num_blocks = num_blocks
        self._cache = cache
        self._holders = [0] * num_blocks
        self._num_held = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, those included that the cache would give up."""
        return self._num_blocks - self._num_held

    def allocate(self, count: int = 1) -> list[int]:
        """Takes blocks for a request.

        Raises:
            OutOfBlocks: there are too few. Nothing has changed then.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks were asked for, but only {self.num_free} are free or can be evicted")
        missing = count - self._allocator.num_free
        if missing > 0 and self._cache is not None:
            self._cache.evict(max(missing, self._num_blocks // _PARTS_OF_POOL))
        blocks = self._pool.allocate(count)
        self.hold(blocks)
        return blocks

    def hold(self, blocks: list[int]) -> None:
        """A request has got references to blocks, from `allocate` or from a cache's `match`."""
        for block in blocks:
            self._num_held += self._holders[block] == 0
            self._holders[block] += 1

    def share(self, block: int) -> None:
        """Adds a request to those that hold a block."""
        self._pool.share(block)
        self.hold([block])

    def free(self, block: int) -> None:
        """A request gives a block up. A cached block stays cached."""
        self._pool.free(block)
        self._holders[block] -= 1
        self._num_held -= self._holders[block] == 0

    def ref_count(self, block: int) -> int:
        """Owners of a block, the cache included."""
        return self._pool.ref_count(block)

    def are_held_once(self, blocks: list[int]) -> bool:
        """Whether each of these blocks has one request, and no more."""
        return all(self._holders[block] == 1 for block in blocks)

    def check(self) -> None:
        """What is counted must be what the pool finds.

        Raises:
            AssertionError: a block has leaked, was freed twice, or is kept by what the cache built on it.
        """
        found = self._pool.num_free
        assert self.num_free == found, f"{self.num_free} blocks are counted as free, and {found} are"
