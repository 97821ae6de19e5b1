"""Keeps the slot of every token, and works out the blocks from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BlockTable:
    """A list of slots."""

    def __init__(self, pool: Any, block_size: int) -> None:
        if type(block_size) is not int or block_size < 1:
            raise ValueError(f"a block has at least one slot, not {block_size!r}")
        self.pool = pool
        self.size = block_size
        self.places: list[int] = []

    @property
    def blocks(self) -> list[int]:
        """Of every first slot."""
        return [slot // self.size for slot in self.places[:: self.size]]

    @property
    def length(self) -> int:
        """Slots in use."""
        return len(self.places)

    @property
    def capacity(self) -> int:
        """Grows in thought as far as it goes."""
        free = self.pool.num_free
        spare = -self.length % self.size
        if spare and self.pool.ref_count(self.blocks[-1]) > 1:
            if free == 0:
                return self.length
            free -= 1
        return self.length + spare + free * self.size

    def slots(self) -> list[int]:
        """A copy."""
        return self.places.copy()

    def append(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Fills the open block, then new ones."""
        if type(count) is not int or count < 1:
            raise ValueError(f"can't append {count!r} tokens")
        inside = len(self.places) % self.size
        old = self.places[-1] // self.size if inside else None
        shared = old is not None and self.pool.ref_count(old) > 1
        fresh = max(0, count - (self.size - inside) % self.size if inside else count)
        new = self.pool.allocate((fresh + self.size - 1) // self.size + (1 if shared else 0))
        copies = []
        if shared and old is not None:
            copy = new[0]
            new = new[1:]
            copies = [(old, copy)]
            self.places[-inside:] = [copy * self.size + offset for offset in range(inside)]
            self.pool.free(old)
            old = copy
        room = [] if old is None else [old * self.size + offset for offset in range(inside, self.size)]
        room += [block * self.size + offset for block in new for offset in range(self.size)]
        self.places += room[:count]
        return room[:count], copies

    def adopt(self, blocks: Sequence[int]) -> None:
        """Slots of full blocks."""
        if self.places:
            raise ValueError("not empty")
        self.places = [block * self.size + offset for block in blocks for offset in range(self.size)]

    def fork(self) -> BlockTable:
        """The same slots."""
        twin = BlockTable(self.pool, self.size)
        twin.places = self.slots()
        for block in twin.blocks:
            self.pool.share(block)
        return twin

    def truncate(self, length: int) -> None:
        """Gives back what no slot is left of."""
        if type(length) is not int or not 0 <= length <= len(self.places):
            raise ValueError(f"can't cut {len(self.places)} tokens to {length!r}")
        before = self.blocks
        self.places = self.places[:length]
        for block in before[len(self.blocks) :]:
            self.pool.free(block)

    def free(self) -> None:
        """Nothing left."""
        self.truncate(0)
