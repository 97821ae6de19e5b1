"""What every scheduler over blocks keeps: the requests in order of arrival, their tokens, and where these lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from labkit.checks import check_count, check_tokens
from labkit.step_plan import StepPlan


class Blocks(Protocol):
    """A pool of blocks: an allocator, or a prefix cache in front of one; see lab 07, task 7."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""

    def allocate(self, count: int = 1) -> list[int]:
        """Takes blocks for a new owner."""

    def free(self, block: int) -> None:
        """Takes an owner from a block."""


@dataclass(eq=False)
class PagedRequest:
    """A request, its tokens, and where their keys and values lie.

    Args:
        request_id: names it.
        tokens: ids of all that is known: the prompt, then what was generated.
        most_tokens: as many will ever be computed. The last generated token is not: nothing follows it.
        num_computed: tokens whose keys and values lie in `blocks`, or in `host_blocks`.
        blocks: its blocks, in the order of its tokens.
        host_blocks: its blocks in host memory, while it is swapped out.
        last_turn: number of its newest chunk among all that its scheduler ever planned; 0 before the first.
    """

    request_id: int
    tokens: list[int]
    most_tokens: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    last_turn: int = 0

    @property
    def num_missing(self) -> int:
        """Tokens that are known, but not computed."""
        return len(self.tokens) - self.num_computed


class PagedScheduler:
    """Requests that share a pool of blocks; who runs in which step is left to subclasses.

    Each step computes some tokens of some requests, so that what is computed catches up with what is known. Then
    the caller appends the token that follows, or removes the request:

        add ──► schedule ──► append ──► schedule ──► append ──► … ──► schedule ──► remove

    Args:
        pool: where blocks come from. Nobody else takes any from it.
        block_size: tokens in a block.

    Raises:
        ValueError: `block_size` is not an int of at least 1.
    """

    def __init__(self, pool: Blocks, block_size: int) -> None:
        check_count("block_size", block_size, 1)
        self._pool = pool
        self._block_size = block_size
        self._num_blocks = pool.num_free
        # In order of arrival.
        self._requests: dict[int, PagedRequest] = {}

    @property
    def num_requests(self) -> int:
        """Requests that were added and not removed."""
        return len(self._requests)

    def add(self, request_id: int, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Put a request behind all that came before it.

        Args:
            request_id: names it from now on.
            prompt: token ids, at least one.
            max_new_tokens: the most tokens that will be generated, at least 1.

        Raises:
            ValueError: an argument is out of range, the id is in use, or the request could need more blocks than
                the pool has: it could never be finished, however long it waits. Nothing has changed then.
        """
        check_count("request_id", request_id, 0)
        check_count("max_new_tokens", max_new_tokens, 1)
        tokens = check_tokens("prompt", prompt)
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is here already; remove it before adding it again")
        most_tokens = len(tokens) + max_new_tokens - 1
        if self._blocks_for(most_tokens) > self._num_blocks:
            raise ValueError(
                f"request {request_id} may need {self._blocks_for(most_tokens)} blocks for {most_tokens} tokens, but "
                f"the pool has {self._num_blocks}; shorten its prompt or lower max_new_tokens"
            )
        self._requests[request_id] = PagedRequest(request_id, tokens, most_tokens)

    def append(self, request_id: int, token: int) -> None:
        """Make known the token that follows a request's newest one.

        Raises:
            ValueError: there is no such request, the token is no id, tokens of the request are still to be
                computed, or it has generated its last one and must be removed. Nothing has changed then.
        """
        request = self._find(request_id)
        check_tokens("token", [token])
        if request.num_missing:
            raise ValueError(
                f"request {request_id} has {request.num_missing} tokens yet to compute; what follows them isn't known"
            )
        if len(request.tokens) == request.most_tokens:
            raise ValueError(f"request {request_id} has generated its last token, which nothing follows; remove it")
        request.tokens.append(token)

    def remove(self, request_id: int) -> None:
        """Forget a request, finished or aborted, wherever it is; all that it holds is free.

        Raises:
            ValueError: there is no such request.
        """
        request = self._find(request_id)
        self._release(request)
        del self._requests[request_id]

    def schedule(self) -> StepPlan:
        """Decides the next step."""
        raise NotImplementedError("choose a scheduler")

    def _find(self, request_id: int) -> PagedRequest:
        """The request of that id; refuses others."""
        if request_id not in self._requests:
            raise ValueError(f"there is no request {request_id!r}: it was never added, or was removed")
        return self._requests[request_id]

    def _blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-num_tokens // self._block_size)

    def _release(self, request: PagedRequest) -> None:
        """Gives a request's blocks back to the pool."""
        for block in reversed(request.blocks):
            self._pool.free(block)
        request.blocks = []
