"""Task 10: a step has so many tokens to give. Answers that are being written get theirs first, then prompts."""

from __future__ import annotations

from labkit.checks import check_count
from labkit.paged_scheduler import Blocks, PagedRequest, PagedScheduler
from labkit.step_plan import Chunk, StepPlan


class TokenBudgetScheduler(PagedScheduler):
    """Gives each request some tokens in each step, so that computed catches up with known, within a budget.

    There are no phases, only requests that miss one token or many. One that holds blocks and misses a single token
    *decodes*; all others *prefill*: a prompt, what is left of one, or all that a preempted request knows.

        budget of 8:   a7  b31  c12 │ d16 d17 d18 d19 d20
                       decodes first │ then a prefill, cut to what is left

    Args:
        pool: where blocks come from.
        block_size: tokens in a block.
        token_budget: the most tokens in one step.
        max_chunk: the most tokens of one prefill in one step; None means that only the budget limits them.

    Raises:
        ValueError: `block_size`, `token_budget` or `max_chunk` is not an int of at least 1.

    Source: Agrawal et al. 2024 (2403.02310); module section 2.4.
    """

    def __init__(self, pool: Blocks, block_size: int, token_budget: int, max_chunk: int | None = None) -> None:
        super().__init__(pool, block_size)
        check_count("token_budget", token_budget, 1)
        if max_chunk is not None:
            check_count("max_chunk", max_chunk, 1)
        self._token_budget = token_budget
        self._max_chunk = max_chunk
        self._num_turns = 0

    def schedule(self, token_budget: int | None = None) -> StepPlan:
        """Decide which tokens the next step computes.

        1. Requests that decode get a token each, as far as the budget goes, in turns: first the one whose last
           turn lies back longest. In a step, too, turns have an order: that of the plan's chunks.
        2. What is left goes to prefills in order of arrival. Each gets all that it misses, but no more than
           `max_chunk` and than what is left.

        A request takes blocks for exactly the tokens that it is given. While too few are free, the request that
        arrived last among those with blocks is preempted by recompute, in the end the very one that asks. If tokens
        were given to it in this step, the budget has them back. Who was preempted doesn't run in this step.

        A request without blocks preempts nobody: if it doesn't fit, it waits, and so do all behind it. Nor does one
        start in a step that preempts somebody. A request whose next token has yet to be appended is passed over.

        Args:
            token_budget: for this step only, at least 1; None means the usual one.

        Returns:
            One chunk for each request that runs, in the order in which they were given their tokens.

        Raises:
            ValueError: `token_budget` is not an int of at least 1. Nothing has changed then.
        """
        if token_budget is not None:
            check_count("token_budget", token_budget, 1)
        # BEGIN SOLUTION
        left = self._token_budget if token_budget is None else token_budget
        given: dict[int, int] = {}
        preempted = False
        for request in self._in_order_of_service():
            count = min(request.num_missing, left, self._max_chunk or left)
            if count == 0:
                break
            needed = self._blocks_for(request.num_computed + count) - len(request.blocks)
            while needed > self._pool.num_free and request.blocks:
                victim = next(r for r in reversed(self._requests.values()) if r.blocks)
                self._release(victim)
                victim.num_computed = 0
                left += given.pop(victim.request_id, 0)
                preempted = True
            # Whoever has none now has just given them up, or would start in a step in which blocks ran out.
            if preempted and not request.blocks:
                continue
            if needed > self._pool.num_free:
                break
            request.blocks += self._pool.allocate(needed)
            given[request.request_id] = count
            left -= count
        return StepPlan(tuple(self._chunk(self._requests[key], count) for key, count in given.items()))
        # END SOLUTION

    # BEGIN SOLUTION
    def _in_order_of_service(self) -> list[PagedRequest]:
        """Who misses tokens: decodes first, in turns; then prefills as they came."""
        requests = [request for request in self._requests.values() if request.num_missing]
        decodes = [request for request in requests if request.num_missing == 1 and request.blocks]
        prefills = [request for request in requests if request not in decodes]
        return sorted(decodes, key=lambda request: request.last_turn) + prefills

    def _chunk(self, request: PagedRequest, count: int) -> Chunk:
        """The next tokens of a request, which count as computed from now on."""
        start, end = request.num_computed, request.num_computed + count
        self._num_turns += 1
        request.num_computed, request.last_turn = end, self._num_turns
        blocks, tokens = tuple(request.blocks), request.tokens
        return Chunk(request.request_id, start, tuple(tokens[start:end]), blocks, end == len(tokens))

    # END SOLUTION
