"""No tree at all: a dict from every stored prefix to its block, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from labkit.checks import check_count, check_tokens

Key = tuple[Hashable, tuple[int, ...]]


class RadixTree:
    """Prefixes end where a block ends, or with a tail."""

    def __init__(self, block_size: int) -> None:
        check_count("block_size", block_size, 1)
        self.size = block_size
        self.block_of: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.clock = 0

    @property
    def num_blocks(self) -> int:
        """One a prefix."""
        return len(self.block_of)

    @property
    def num_nodes(self) -> int:
        """Prefixes at which an edge begins."""
        return sum(self._begins_an_edge(key) for key in self.block_of)

    def _parent(self, key: Key) -> Key:
        return (key[0], key[1][: (len(key[1]) - 1) // self.size * self.size])

    def _begins_an_edge(self, key: Key) -> bool:
        siblings = [other for other in self.block_of if self._parent(other) == self._parent(key)]
        return len(siblings) > 1 or len(key[1]) <= self.size or len(key[1]) % self.size != 0

    def _holders(self, tokens: list[int], namespace: Hashable) -> tuple[list[Key], int]:
        best, length = None, 0
        for key in self.block_of:
            common = next(
                (i for i, (a, b) in enumerate(zip(key[1], tokens, strict=False)) if a != b),
                min(len(key[1]), len(tokens)),
            )
            if key[0] == namespace and common > length:
                best, length = key, common
        if best is None:
            return [], 0
        ends = range(self.size, length + 1, self.size)
        whole = [(namespace, best[1][:end]) for end in ends]
        if length % self.size == 0:
            return whole, length
        end = min(len(best[1]), (length // self.size + 1) * self.size)
        return [*whole, (namespace, best[1][:end])], length

    def match(self, tokens: Sequence[int], namespace: Hashable = None) -> tuple[list[int], int]:
        """Every prefix is looked at."""
        keys, length = self._holders(list(tokens), namespace)
        return [self.block_of[key] for key in keys], length

    def touch(self, tokens: Sequence[int], namespace: Hashable = None) -> None:
        """The clock goes on."""
        self.clock += 1
        self.used.update(dict.fromkeys(self._holders(list(tokens), namespace)[0], self.clock))

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], namespace: Hashable = None
    ) -> tuple[list[int], list[int]]:
        """Prefix by prefix."""
        ids = check_tokens("tokens", tokens)
        needed = -(-len(ids) // self.size)
        if needed > len(blocks):
            raise ValueError(f"{len(blocks)} blocks can't hold {len(ids)} tokens")
        held, length = self._holders(ids, namespace)
        covered = needed if length == len(ids) else length // self.size
        self.clock += 1
        self.used.update(dict.fromkeys(held[:covered], self.clock))
        given_up = []
        for index in range(covered, needed):
            key = (namespace, tuple(ids[: (index + 1) * self.size]))
            for stop in range(index * self.size + 1, len(key[1])):
                if (tail := (namespace, key[1][:stop])) in self.block_of:
                    given_up.append(self.block_of.pop(tail))
            self.block_of[key], self.used[key] = blocks[index], self.clock
        return list(blocks[covered:needed]), given_up

    def _ends(self, kept: set[Key]) -> list[Key]:
        parents = {self._parent(key) for key in self.block_of}
        return [key for key in self.block_of if key not in parents and key not in kept]

    def num_evictable(self, may_go: Callable[[int], bool]) -> int:
        """All but those in use and what they are built on."""
        kept: set[Key] = set()
        for name, tokens in [key for key, block in self.block_of.items() if not may_go(block)]:
            kept.add((name, tokens))
            kept.update((name, tokens[:end]) for end in range(self.size, len(tokens), self.size))
        return len(self.block_of) - len(kept)

    def evict(self, count: int, may_go: Callable[[int], bool]) -> list[int]:
        """One after the other."""
        check_count("count", count, 0)
        gone: list[int] = []
        kept: set[Key] = set()
        while len(gone) < count and (ends := self._ends(kept)):
            oldest = min(ends, key=self.used.__getitem__)
            if may_go(self.block_of[oldest]):
                gone.append(self.block_of.pop(oldest))
            else:
                kept.add(oldest)
        return gone
