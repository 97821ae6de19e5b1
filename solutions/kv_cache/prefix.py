"""Task 8b: blocks that are found again by what they hold, so that a shared prefix is computed once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# BEGIN SOLUTION
from itertools import islice

# END SOLUTION
from labkit.checks import check_count, check_tokens

from .block_hash import block_hash, root_hash
from .blocks import BlockAllocator, OutOfBlocks

HashBlock = Callable[[bytes, tuple[int, ...]], bytes]


@dataclass(eq=False)
class _Entry:
    """A cached block. Its parent is the entry of the block before, or (adapter, salt) for a first block."""

    key: bytes
    block: int
    tokens: tuple[int, ...]
    parent: _Entry | tuple[str | None, str | None]
    children: int = 0


class PrefixCache:
    """Keeps full blocks after their sequences are gone, and finds them by their tokens.

    The cache is one owner among others: it holds one reference to each block that it keeps.

        owners of a block      sequences  +  1 if cached
        may be evicted         cached, no sequence, no cached block built on it
        num_free               free in the allocator + all that eviction could free

    It is a pool as well (`allocate`, `share`, `free`): block tables that take their blocks from here get evicted
    blocks when the allocator has none left. Least recently used blocks go first, where use means that `match`
    or `insert` came by; in a chain the last block goes before those it was built on.

    Args:
        allocator: owns the blocks.
        block_size: tokens in a block.
        hash_block: called as `hash_block(parent, tokens)`; see `block_hash`. It only has to be quick to compare:
            two blocks with one hash are told apart by their tokens, and by what came before them.

    Raises:
        ValueError: `block_size` is not an int of at least 1.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, hash_block: HashBlock = block_hash) -> None:
        check_count("block_size", block_size, 1)
        self._allocator = allocator
        self._block_size = block_size
        self._hash_block = hash_block
        # By hash, least recently used first. A parent always stands behind its children.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._cached_blocks: set[int] = set()

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their tokens."""
        return len(self._entries)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now: free ones, and those that it could evict."""
        # BEGIN SOLUTION
        return self._allocator.num_free + sum(1 for _ in self._evictable())
        # END SOLUTION

    def match(self, tokens: Sequence[int], adapter: str | None = None, salt: str | None = None) -> list[int]:
        """Find the longest cached prefix of a prompt, and take a reference to each of its blocks.

        At least one token is left over for the model to compute: without it there would be no logits to go on from.

        Args:
            tokens: the whole prompt.
            adapter: as in `root_hash`.
            salt: as in `root_hash`.

        Returns:
            Blocks that hold the first `len(blocks) * block_size` tokens, in order. The caller owns a reference to
            each and frees it in the end.

        Raises:
            ValueError: the prompt is empty or holds something that is no token id.
        """
        check_tokens("tokens", tokens)
        # BEGIN SOLUTION
        ids = list(tokens)
        most = (len(ids) - 1) // self._block_size
        found, _, _ = self._walk(ids[: most * self._block_size], adapter, salt)
        for entry in found:
            self._allocator.share(entry.block)
        self._touch(found)
        return [entry.block for entry in found]
        # END SOLUTION

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], adapter: str | None = None, salt: str | None = None
    ) -> int:
        """Make the full blocks of a sequence findable; a partly filled last block is left out.

        A prefix that is cached already stays where it is: of two blocks with equal content the first is kept.

        Args:
            tokens: those whose keys and values lie in the blocks, complete for every layer.
            blocks: the sequence's block table; the sequence stays the owner of its references.
            adapter: as in `root_hash`.
            salt: as in `root_hash`.

        Returns:
            How many blocks are new in the cache.

        Raises:
            ValueError: the tokens are none, the blocks are too few for them, or one that is to be cached is free,
                unknown, or cached already for other tokens. Nothing has changed then.
        """
        check_tokens("tokens", tokens)
        # BEGIN SOLUTION
        ids = list(tokens)
        full = len(ids) // self._block_size
        if len(blocks) < full:
            raise ValueError(f"{len(ids)} tokens fill {full} blocks of {self._block_size}, got {len(blocks)} blocks")
        found, parent, key = self._walk(ids[: full * self._block_size], adapter, salt)
        new = list(blocks[len(found) : full])
        for index, block in enumerate(new):
            if self._allocator.ref_count(block) == 0:
                raise ValueError(f"block {block} is free; only what a sequence owns can be cached")
            if block in self._cached_blocks or block in new[:index]:
                raise ValueError(f"block {block} is cached already, for other tokens")
        cached = len(self._entries)
        for index, block in enumerate(new, start=len(found)):
            chunk = self._chunk(ids, index)
            key = self._hash_block(key, chunk)
            if key in self._entries:
                break  # a collision: whatever has this hash was there first, and nothing can be built on this block
            entry = _Entry(key, block, chunk, parent)
            if isinstance(parent, _Entry):
                parent.children += 1
            self._allocator.share(block)
            self._cached_blocks.add(block)
            self._entries[key] = entry
            found.append(entry)
            parent = entry
        self._touch(found)
        return len(self._entries) - cached
        # END SOLUTION

    def evict(self, count: int) -> int:
        """Forget up to `count` blocks that no sequence owns, least recently used first.

        Returns:
            How many were forgotten; they are free now.

        Raises:
            ValueError: `count` is no int of at least 0.
        """
        check_count("count", count, 0)
        # BEGIN SOLUTION
        victims = self._victims(count)
        self._forget(victims)
        return len(victims)
        # END SOLUTION

    def allocate(self, count: int = 1) -> list[int]:
        """Take blocks as the allocator does; if too few are free, evict as many as are missing and no more.

        Raises:
            OutOfBlocks: eviction couldn't free enough. Nothing was evicted then.
            ValueError: `count` is no int of at least 0.
        """
        check_count("count", count, 0)
        # BEGIN SOLUTION
        missing = max(0, count - self._allocator.num_free)
        victims = self._victims(missing)
        if len(victims) < missing:
            raise OutOfBlocks(f"{count} blocks were asked for, but only {self.num_free} are free or can be evicted")
        self._forget(victims)
        return self._allocator.allocate(count)
        # END SOLUTION

    def share(self, block: int) -> None:
        """Give a block one more owner; see the allocator."""
        self._allocator.share(block)

    def free(self, block: int) -> None:
        """Take one owner from a block; see the allocator. A cached block stays cached."""
        self._allocator.free(block)

    def ref_count(self, block: int) -> int:
        """Owners of a block, the cache included."""
        return self._allocator.ref_count(block)

    # BEGIN SOLUTION
    def _chunk(self, ids: list[int], index: int) -> tuple[int, ...]:
        """The tokens of block `index`."""
        return tuple(ids[index * self._block_size : (index + 1) * self._block_size])

    def _walk(
        self, ids: list[int], adapter: str | None, salt: str | None
    ) -> tuple[list[_Entry], _Entry | tuple[str | None, str | None], bytes]:
        """The entries of the longest cached prefix; the parent of whatever comes next, and that parent's hash."""
        found: list[_Entry] = []
        parent: _Entry | tuple[str | None, str | None] = (adapter, salt)
        key = root_hash(adapter, salt)
        for index in range(len(ids) // self._block_size):
            chunk = self._chunk(ids, index)
            entry = self._entries.get(self._hash_block(key, chunk))
            # An equal hash is no proof. Tokens and parent are: the parent was compared in the round before.
            if entry is None or entry.tokens != chunk or entry.parent != parent:
                break
            found.append(entry)
            parent, key = entry, entry.key
        return found, parent, key

    def _touch(self, chain: list[_Entry]) -> None:
        """Mark a chain as just used, the last block first, so that it will also be evicted first."""
        for entry in reversed(chain):
            self._entries.move_to_end(entry.key)

    def _evictable(self) -> Iterator[_Entry]:
        """What eviction could free, in the order in which it would: children always come before parents.

        Found one by one, so that whoever wants few looks at few.
        """
        kept: set[bytes] = set()
        for entry in self._entries.values():
            if entry.key not in kept and self._allocator.ref_count(entry.block) == 1:
                yield entry
            elif isinstance(entry.parent, _Entry):
                kept.add(entry.parent.key)

    def _victims(self, count: int) -> list[_Entry]:
        """The first `count` of what can be evicted, or all."""
        return list(islice(self._evictable(), count))

    def _forget(self, victims: list[_Entry]) -> None:
        """Give up what nobody uses."""
        for entry in victims:
            del self._entries[entry.key]
            self._cached_blocks.remove(entry.block)
            if isinstance(entry.parent, _Entry):
                entry.parent.children -= 1
            self._allocator.free(entry.block)

    # END SOLUTION
