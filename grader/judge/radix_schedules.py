"""What a radix tree and its cache are judged by: random schedules under the KV oracle, and a flat model of the tree."""

from __future__ import annotations

from typing import Any

from grader.judge.kv_oracle import Sequence
from grader.judge.kv_schedules import Schedule


class RadixSchedule(Schedule):
    """The schedules of task 8 with hits that end anywhere, also inside a block that must be copied before it is written.

    Args:
        lab: gives `BlockAllocator`, `BlockTable` and `RadixCache`.
        seed: decides everything.
    """

    def __init__(self, lab: Any, seed: int) -> None:
        super().__init__(lab, seed, cached=True, make_cache=lab.RadixCache)
        self.hit_tails = self.swapped = 0

    def _take_prefix(self, sequence: Sequence, prompt: list[int]) -> None:
        blocks, length = self.cache.match(prompt, **self._names(sequence))
        assert length < len(prompt), f"match of {len(prompt)} tokens hit {length}: one must be left to compute"
        assert len(blocks) == -(-length // self.block_size), (
            f"match says that {length} tokens lie in the blocks {blocks} of {self.block_size} tokens"
        )
        sequence.table.adopt(blocks)
        sequence.table.truncate(length)
        sequence.tokens = prompt[:length]
        sequence.slots = sequence.table.slots()
        self.hit_blocks += len(blocks)
        self.hit_tails += length % self.block_size != 0
        self._read(sequence)

    def _insert(self, sequence: Sequence) -> None:
        self.cache.insert(sequence.tokens, sequence.table.blocks, **self._names(sequence))
        if self.random.random() < 0.5:
            self._swap(sequence)

    def _swap(self, sequence: Sequence) -> None:
        """The sequence goes on with the cached blocks; its own copies of them go back to the pool."""
        twin = Sequence(sequence.name, self.lab.BlockTable(self.pool, self.block_size), [], sequence.namespace)
        self._take_prefix(twin, [*sequence.tokens, 0])
        assert twin.tokens == sequence.tokens, (
            f"the {len(sequence.tokens)} tokens of {sequence.name} were just cached, tail included, but match of them "
            f"and one more found {len(twin.tokens)}"
        )
        sequence.table.free()
        sequence.table, sequence.slots = twin.table, twin.slots
        self.swapped += 1


class FlatPrefixes:
    """The radix tree's content without a tree: for every prefix that ends with a block, or with a tail, its block.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_of: dict[tuple[int, ...], int] = {}
        self.used: dict[int, int] = {}
        self.now = 0

    def longest(self, tokens: list[int]) -> int:
        """Tokens of the longest prefix that is stored."""
        return max((_common(list(key), tokens) for key in self.block_of), default=0)

    def check_match(self, tokens: list[int], found: tuple[list[int], int]) -> None:
        """Fail unless blocks and length are those of the longest prefix."""
        blocks, length = found
        right, size = self.longest(tokens), self.block_size
        assert length == right, f"of {tokens} the first {right} tokens are stored, match found {length}"
        assert len(blocks) == -(-length // size), f"{length} tokens don't lie in the blocks {blocks} of {size} tokens"
        for index, block in enumerate(blocks):
            end = min((index + 1) * size, length)
            holders = [
                self.block_of[key]
                for key in self.block_of
                if list(key[:end]) == tokens[:end] and index * size < len(key) <= (index + 1) * size
            ]
            assert block in holders, f"tokens {index * size} to {end - 1} of {tokens} lie in {holders}, not in {block}"

    def touch(self, blocks: list[int]) -> None:
        """These blocks were used."""
        self.now += 1
        self.used.update(dict.fromkeys(blocks, self.now))

    def insert(
        self, tokens: list[int], blocks: list[int], found: tuple[list[int], int]
    ) -> tuple[list[int], list[int]]:
        """Store a sequence of which `found` was stored before; the blocks taken, and those of a tail given up."""
        held, length = found
        needed = -(-len(tokens) // self.block_size)
        covered = needed if length == len(tokens) else length // self.block_size
        taken, dropped = list(blocks[covered:needed]), []
        for index in range(covered, needed):
            start, end = index * self.block_size, min((index + 1) * self.block_size, len(tokens))
            for tail in [tuple(tokens[:stop]) for stop in range(start + 1, end)]:
                if tail in self.block_of:
                    dropped.append(self.block_of.pop(tail))
            self.block_of[tuple(tokens[:end])] = blocks[index]
        self.touch([*held[:covered], *taken])
        return taken, dropped

    def oldest(self, busy: set[int]) -> int | None:
        """The block that must go next: nothing stored is built on it, nobody needs it, longest out of use."""
        free = [
            key
            for key, block in self.block_of.items()
            if block not in busy and not any(other != key and other[: len(key)] == key for other in self.block_of)
        ]
        if not free:
            return None
        return self.block_of[min(free, key=lambda key: self.used[self.block_of[key]])]

    def forget(self, block: int) -> None:
        """A block is gone."""
        self.block_of = {key: other for key, other in self.block_of.items() if other != block}


def _common(a: list[int], b: list[int]) -> int:
    pairs = list(zip(a, b, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
