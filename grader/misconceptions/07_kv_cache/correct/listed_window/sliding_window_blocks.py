"""Keeps a block for each index, in a dict from which the front is taken out."""

from __future__ import annotations

from typing import Any

from labkit.checks import check_count


class WindowedBlockTable:
    """Block number i of the sequence is `self.held[i]`."""

    def __init__(self, pool: Any, block_size: int, window: int) -> None:
        check_count("block_size", block_size, 1)
        check_count("window", window, 1)
        self.pool, self.size, self.window = pool, block_size, window
        self.held: dict[int, int] = {}
        self.length = 0

    @property
    def start(self) -> int:
        """Of the lowest index."""
        return min(self.held, default=0) * self.size

    @property
    def blocks(self) -> list[int]:
        """By index."""
        return [self.held[index] for index in sorted(self.held)]

    def slots(self) -> list[int]:
        """Token by token."""
        return [self.held[i // self.size] * self.size + i % self.size for i in range(self.start, self.length)]

    def append(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Takes, copies, and drops."""
        check_count("count", count, 1)
        tail = self.length // self.size if self.length % self.size else None
        shared = tail is not None and self.pool.ref_count(self.held[tail]) > 1
        missing = [i for i in range((self.length + count - 1) // self.size + 1) if i >= self.start // self.size]
        missing = [i for i in missing if i not in self.held]
        new = self.pool.allocate(len(missing) + shared)
        copies = []
        if shared and tail is not None:
            copies.append((self.held[tail], new[-1]))
            self.pool.free(self.held[tail])
            self.held[tail] = new.pop()
        self.held.update(zip(missing, new, strict=True))
        for index in [i for i in self.held if (i + 1) * self.size <= self.length - self.window + 1]:
            self.pool.free(self.held.pop(index))
        self.length += count
        return self.slots()[-count:], copies

    def truncate(self, length: int) -> None:
        """Back to where nothing is missing."""
        check_count("length", length, 0)
        missing = length and self.start and length - self.window + 1 < self.start
        if length > self.length or missing:
            raise ValueError(f"can't go back from {self.length} to {length} tokens; held are {self.start} on")
        for index in [i for i in self.held if i * self.size >= length]:
            self.pool.free(self.held.pop(index))
        self.length = length

    def fork(self) -> WindowedBlockTable:
        """One more owner for each."""
        other = WindowedBlockTable(self.pool, self.size, self.window)
        for index, block in self.held.items():
            self.pool.share(block)
            other.held[index] = block
        other.length = self.length
        return other

    def free(self) -> None:
        """From the end."""
        for index in sorted(self.held, reverse=True):
            self.pool.free(self.held.pop(index))
        self.length = 0
