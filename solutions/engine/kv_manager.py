"""Who holds which blocks: requests, the prefix cache, and host memory for those that were swapped out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from solutions.kv_cache.block_table import BlockTable
from solutions.kv_cache.blocks import BlockAllocator
from solutions.kv_cache.prefix import PrefixCache
from solutions.kv_cache.radix_cache import RadixCache

from .held_blocks import HeldBlocks
from .request import Request, blocks_for

PREFIX_CACHES = ("hash", "radix", "none")


class MoveKind(Enum):
    """Where a block goes: to another block, to host memory, or back from there."""

    COPY = "copy"
    OUT = "out"
    IN = "in"


@dataclass(frozen=True)
class Move:
    """One block to be copied before a step computes. Moves are made in the order in which they were decided.

    That order is what makes them right: a block that a move reads may be handed to somebody else by a later decision
    of the same step, and never by an earlier one.
    """

    kind: MoveKind
    source: int
    target: int


@dataclass(frozen=True)
class SlotMove:
    """One token's keys and values, to be copied from slot to slot after a step: a draft that was accepted moves up."""

    source: int
    target: int


class KVManager:
    """Blocks of the pool and of host memory, and all their owners.

        pool        free │ requests' blocks (shared ones counted once) │ cached, no request: evicted when needed
        host        free │ blocks of swapped requests

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        prefix_cache: "hash" finds whole blocks, "radix" to the token, "none" nothing.
        num_host_blocks: blocks in host memory; 0 if nothing is ever swapped.
        seals_blocks: whether a full block is never written to again, nor is a copy of it, so that prompts hit whole
            blocks only. The memory is told then which blocks are open.

    Raises:
        ValueError: a size out of range, or an unknown kind of prefix cache.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: str = "hash", num_host_blocks: int = 0,
        seals_blocks: bool = False,
    ) -> None:  # fmt: skip
        if prefix_cache not in PREFIX_CACHES:
            raise ValueError(f"prefix_cache must be one of {', '.join(PREFIX_CACHES)}, got {prefix_cache!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._seals_blocks = seals_blocks
        allocator = BlockAllocator(num_blocks)
        self._cache: PrefixCache | RadixCache | None = None
        if prefix_cache == "hash":
            self._cache = PrefixCache(allocator, block_size)
        elif prefix_cache == "radix":
            self._cache = RadixCache(allocator, block_size)
        self._pool = HeldBlocks(allocator if self._cache is None else self._cache, allocator, num_blocks, self._cache)
        self._host = BlockAllocator(num_host_blocks) if num_host_blocks else None

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now, those included that the cache would give up."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a prompt could hit."""
        return 0 if self._cache is None else self._cache.num_cached

    @property
    def num_host_free(self) -> int:
        """Free blocks in host memory."""
        return 0 if self._host is None else self._host.num_free

    def new_table(self) -> BlockTable:
        """An empty block table for a request."""
        return BlockTable(self._pool, self.block_size)

    def attach_prefix(self, request: Request) -> int:
        """Gives an empty request the blocks that hold a prefix of what it knows; returns the tokens that are there."""
        if self._cache is None:
            return 0
        names = {"adapter": request.adapter, "salt": request.salt}
        if isinstance(self._cache, RadixCache):
            blocks, length = self._cache.match(request.tokens, **names)
        else:
            blocks = self._cache.match(request.tokens, **names)
            length = len(blocks) * self.block_size
        self._pool.hold(blocks)
        request.table.adopt(blocks)
        request.table.truncate(length - length % self.block_size if self._seals_blocks else length)
        request.num_findable = request.table.length // self.block_size
        return request.table.length

    def drop_partial_block(self, request: Request) -> int:
        """Gives up what a hit found in part of a block, whose copy would cost a block; returns the tokens left.

        A request whose blocks lie in host memory has hit nothing and keeps what it has computed.
        """
        if request.host_blocks:
            return request.num_computed
        request.table.truncate(request.table.length - request.table.length % self.block_size)
        return request.table.length

    def fits(self, request: Request, count: int) -> bool:
        """Whether a request could have `count` more tokens now."""
        return request.table.capacity >= request.table.length + count

    def room(self, request: Request, spared: int) -> int:
        """How many more tokens a request could have now, so many blocks left to others; may be negative."""
        return request.table.capacity - request.table.length - spared * self.block_size

    def reserve(self, request: Request, count: int) -> tuple[list[int], list[Move]]:
        """Slots for `count` more tokens, and the block that must be copied first if others own it.

        Raises:
            OutOfBlocks: see `fits`. Nothing has changed then.
        """
        slots, copies = request.table.append(count)
        return slots, [Move(MoveKind.COPY, source, target) for source, target in copies]

    def remember(self, request: Request) -> None:
        """Lets others find the request's full blocks, all of whose tokens are computed, while it holds them.

        Somebody else may have computed the same text at the same time, and been first: his block is cached then, and
        the request's own is not. What follows is kept back until the request ends. Cached now, it would keep blocks in
        the cache that no request holds, and nobody would know how many can be had without looking at all.
        """
        first, full = request.num_findable, self._num_full(request)
        if self._cache is None or full <= first or self._insert(request, first + 1) == 0:
            return
        # A new block has nothing built on it yet, so all that follow it are new.
        self._insert(request, full)
        request.num_findable = full

    def open_blocks(self, requests: Iterable[Request]) -> frozenset[int]:
        """Blocks that hold the ends of requests' computed texts, none of them full; nothing if nobody asks for them."""
        if not self._seals_blocks:
            return frozenset()
        size = self.block_size
        ends = ((one.table.blocks, one.num_computed) for one in requests if one.num_computed % size)
        return frozenset(blocks[length // size] for blocks, length in ends)

    def release(self, request: Request, keep: bool = False) -> None:
        """Takes all blocks from a request, in the pool and in host memory.

        Args:
            request: whose.
            keep: let others find its full blocks, until they are needed.
        """
        if keep and self._cache is not None:
            full = self._num_full(request)
            own = request.table.blocks[request.num_findable : full]
            if own and self._pool.are_held_once(own):
                self._insert(request, full)  # whatever they are built on: in a moment nobody holds them
            else:
                self.remember(request)
        request.table.free()
        request.num_findable = 0
        self._free_host(request.host_blocks)
        request.host_blocks = ()

    def can_swap_out(self, request: Request) -> bool:
        """Whether host memory has room for what a request has computed."""
        return request.num_computed > 0 and self.num_host_free >= blocks_for(request.num_computed, self.block_size)

    def swap_out(self, request: Request) -> list[Move]:
        """Moves what a request has computed to host memory; it has no blocks of the pool then."""
        assert self._host is not None, "there is no host memory to swap to"
        request.table.truncate(request.num_computed)
        blocks = request.table.blocks
        request.host_blocks = tuple(self._host.allocate(len(blocks)))
        request.table.free()
        request.num_findable = 0
        return [Move(MoveKind.OUT, *pair) for pair in zip(blocks, request.host_blocks, strict=True)]

    def swap_in(self, request: Request) -> list[Move]:
        """Brings a swapped request back; its blocks must fit."""
        self.reserve(request, request.num_computed)
        moves = [Move(MoveKind.IN, *pair) for pair in zip(request.host_blocks, request.table.blocks, strict=True)]
        self._free_host(request.host_blocks)
        request.host_blocks = ()
        return moves

    def fork(self, request: Request, parent: Request) -> None:
        """Gives an empty request the blocks of another, wherever they lie: each has its own references to them."""
        request.table, request.num_findable = parent.table.fork(), parent.num_findable
        request.num_computed = parent.num_computed
        request.host_blocks = parent.host_blocks
        for block in parent.host_blocks:
            assert self._host is not None
            self._host.share(block)

    def check_idle(self) -> None:
        """With no request alive, every block must be free or cached, and host memory empty.

        Raises:
            AssertionError: a block has leaked, or was freed twice.
        """
        self._pool.check()
        free = self.num_free
        assert free == self.num_blocks, f"{self.num_blocks - free} of {self.num_blocks} blocks have leaked"
        assert self._host is None or self._host.num_free == self._host.num_blocks, "host blocks have leaked"

    def _num_full(self, request: Request) -> int:
        """Its full blocks, all of whose tokens are computed; what was swapped out is computed, and not in the pool."""
        return min(request.num_computed, request.table.length) // self.block_size

    def _insert(self, request: Request, num_blocks: int) -> int:
        """Caches the first blocks of a request; returns how many of them are new in the cache."""
        assert self._cache is not None
        return self._cache.insert(
            request.tokens[: num_blocks * self.block_size], request.table.blocks, adapter=request.adapter,
            salt=request.salt,
        )  # fmt: skip

    def _free_host(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._host is not None
            self._host.free(block)
