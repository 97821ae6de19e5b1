"""Task 11b: the owners of what a radix tree holds, so that a shared prefix is computed once, to the token."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.checks import check_count, check_tokens

from .blocks import BlockPool, OutOfBlocks
from .radix import RadixTree


class RadixCache:
    """A prefix cache that hits token by token, and keeps partly filled last blocks, too.

    As in task 8 the cache is one owner among others, with one reference to each block that it keeps, and a pool:
    block tables that take their blocks from here get evicted blocks when the allocator has none left.

        owners of a block      sequences  +  1 if cached
        may be evicted         at the end of a leaf, and no sequence owns it
        num_free               free in the allocator + all that eviction could free

    A hit may end inside a block. The block is then lent whole: its reader cuts its table to the length of the hit, and
    the table copies the block before it writes behind that (copy-on-write), as it does with any block that has other
    owners. So does the sequence whose own tail is cached, when it goes on.

        blocks, length = cache.match(prompt)
        table.adopt(blocks)
        table.truncate(length)

    The copy takes a block. Who has none to spare truncates to whole blocks, and inserts whole blocks only until the
    sequence is finished.

    Args:
        allocator: owns the blocks.
        block_size: tokens in a block.

    Raises:
        ValueError: `block_size` is not an int of at least 1.
    """

    def __init__(self, allocator: BlockPool, block_size: int) -> None:
        self._tree = RadixTree(block_size)
        self._allocator = allocator
        self._block_size = block_size
        # Cached blocks, each with the number of its tokens that can be found: fewer than all in a tail.
        self._known: dict[int, int] = {}

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their tokens."""
        return len(self._known)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now: free ones, and those that it could evict."""
        # BEGIN SOLUTION
        return self._allocator.num_free + self._tree.num_evictable(self._is_idle)
        # END SOLUTION

    def match(
        self, tokens: Sequence[int], adapter: str | None = None, salt: str | None = None
    ) -> tuple[list[int], int]:
        """Find the longest cached prefix of a prompt, and take a reference to each of its blocks.

        At least one token is left over for the model to compute: without it there would be no logits to go on from.

        Args:
            tokens: the whole prompt.
            adapter: name of the fine-tuned weights in use; None for the plain model.
            salt: separates tenants that must not see each other's blocks; None for the common space.

        Returns:
            Blocks that hold the prefix, in order, and its length in tokens, at most one less than the prompt's. The
            caller owns a reference to each block and frees it in the end.

        Raises:
            ValueError: the prompt is empty or holds something that is no token id.
        """
        check_tokens("tokens", tokens)
        # BEGIN SOLUTION
        ids = list(tokens)
        blocks, length = self._tree.match(ids[:-1], (adapter, salt))
        self._tree.touch(ids[:-1], (adapter, salt))
        for block in blocks:
            self._allocator.share(block)
        return blocks, length
        # END SOLUTION

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], adapter: str | None = None, salt: str | None = None
    ) -> int:
        """Make a sequence findable, its partly filled last block included.

        A prefix that is cached already stays where it is: of two blocks with equal content the first is kept, and the
        sequence's own goes back to the pool with the sequence. A cached tail that the sequence continues is given up
        for the sequence's fuller block, or grows, if that is the very same block.

        Args:
            tokens: those whose keys and values lie in the blocks, complete for every layer.
            blocks: the sequence's block table; the sequence stays the owner of its references.
            adapter: as in `match`.
            salt: as in `match`.

        Returns:
            How many of these blocks the cache took.

        Raises:
            ValueError: the tokens are none, the blocks are too few for them, or one that is to be cached is free,
                unknown, or cached already for other tokens. Nothing has changed then.
        """
        check_tokens("tokens", tokens)
        # BEGIN SOLUTION
        ids = list(tokens)
        held, length = self._tree.match(ids, (adapter, salt))
        first = length // self._block_size
        if length < len(ids):
            self._check_new(blocks[first : -(-len(ids) // self._block_size)], held[first:], length % self._block_size)
        taken, dropped = self._tree.insert(ids, blocks, (adapter, salt))
        self._give_up(dropped)  # first, for a tail that grows in its own block is in both lists
        for index, block in enumerate(taken, start=first):
            self._allocator.share(block)
            self._known[block] = min(self._block_size, len(ids) - index * self._block_size)
        return len(taken)
        # END SOLUTION

    def evict(self, count: int) -> int:
        """Forget up to `count` blocks that no sequence owns, least recently used first, from the ends of leaves.

        Returns:
            How many were forgotten; they are free now.

        Raises:
            ValueError: `count` is no int of at least 0.
        """
        check_count("count", count, 0)
        # BEGIN SOLUTION
        victims = self._tree.evict(count, self._is_idle)
        self._give_up(victims)
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
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks were asked for, but only {self.num_free} are free or can be evicted")
        self.evict(max(0, count - self._allocator.num_free))
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
    def _is_idle(self, block: int) -> bool:
        """Whether the cache is a block's only owner."""
        return self._allocator.ref_count(block) == 1

    def _check_new(self, new: Sequence[int], alike: list[int], common: int) -> None:
        """Refuse blocks that can't become the cache's; `alike` begins with `common` tokens of the first of them."""
        for index, block in enumerate(new):
            if self._allocator.ref_count(block) == 0:
                raise ValueError(f"block {block} is free; only what a sequence owns can be cached")
            # A fork may have cached the front of this very block, as its tail.
            own_tail = index == 0 and alike == [block] and self._known[block] == common
            if (block in self._known and not own_tail) or block in new[:index]:
                raise ValueError(f"block {block} is cached already, for other tokens")

    def _give_up(self, blocks: Sequence[int]) -> None:
        """Free the cache's own reference to blocks that the tree no longer holds."""
        for block in blocks:
            del self._known[block]
            self._allocator.free(block)

    # END SOLUTION
