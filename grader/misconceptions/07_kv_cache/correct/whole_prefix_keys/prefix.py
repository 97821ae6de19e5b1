"""No hashes at all: a block's key is every token up to its end, and a clock says when it was used last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .block_hash import block_hash
from .blocks import OutOfBlocks

Key = tuple[str | None, str | None, tuple[int, ...]]


class PrefixCache:
    """A dict from whole prefixes to blocks."""

    def __init__(self, allocator: Any, block_size: int, hash_block: Any = block_hash) -> None:
        if type(block_size) is not int or block_size < 1:
            raise ValueError(f"a block has at least one token, not {block_size!r}")
        self.allocator, self.size = allocator, block_size
        self.block_of: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.clock = 0

    @property
    def num_cached(self) -> int:
        """Keys."""
        return len(self.block_of)

    @property
    def num_free(self) -> int:
        """Free, or free once what is idle is gone."""
        return self.allocator.num_free + len(self._idle())

    def _idle(self) -> set[Key]:
        busy: set[Key] = set()
        for adapter, salt, tokens in self.block_of:
            if self.allocator.ref_count(self.block_of[adapter, salt, tokens]) > 1:
                ends = range(self.size, len(tokens) + 1, self.size)
                busy |= {(adapter, salt, tokens[:end]) for end in ends}
        return set(self.block_of) - busy

    def _use(self, keys: list[Key]) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(keys, self.clock))

    def _keys(self, tokens: Sequence[int], count: int, adapter: str | None, salt: str | None) -> list[Key]:
        if not tokens or min(tokens) < 0:
            raise ValueError(f"these are no tokens: {list(tokens)}")
        return [(adapter, salt, tuple(tokens[: (i + 1) * self.size])) for i in range(count)]

    def match(self, tokens: Sequence[int], adapter: str | None = None, salt: str | None = None) -> list[int]:
        """As long as prefixes are known."""
        hits: list[Key] = []
        for key in self._keys(tokens, max(0, len(tokens) - 1) // self.size, adapter, salt):
            if key not in self.block_of:
                break
            hits.append(key)
        self._use(hits)
        for key in hits:
            self.allocator.share(self.block_of[key])
        return [self.block_of[key] for key in hits]

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], adapter: str | None = None, salt: str | None = None
    ) -> int:
        """Adds the prefixes that are not known."""
        keys = self._keys(tokens, len(tokens) // self.size, adapter, salt)
        if len(keys) > len(blocks):
            raise ValueError(f"{len(keys)} full blocks, but only {len(blocks)} are named")
        new = {key: block for key, block in zip(keys, blocks, strict=False) if key not in self.block_of}
        known = list(self.block_of.values()) + list(new.values())
        for block in new.values():
            if self.allocator.ref_count(block) < 1 or known.count(block) > 1:
                raise ValueError(f"block {block} is free or somebody else's")
        for key, block in new.items():
            self.allocator.share(block)
            self.block_of[key] = block
        self._use(keys)
        return len(new)

    def evict(self, count: int) -> int:
        """Oldest first, of one age the longest first."""
        if type(count) is not int or count < 0:
            raise ValueError(f"can't evict {count!r}")
        victims = sorted(self._idle(), key=lambda key: (self.used[key], -len(key[2])))[:count]
        for key in victims:
            self.allocator.free(self.block_of.pop(key))
            del self.used[key]
        return len(victims)

    def allocate(self, count: int = 1) -> list[int]:
        """Makes room first."""
        if type(count) is not int or count < 0:
            raise ValueError(f"can't give {count!r} blocks")
        short = count - self.allocator.num_free
        if short > len(self._idle()):
            raise OutOfBlocks(f"{short} more than can be had")
        if short > 0:
            self.evict(short)
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
