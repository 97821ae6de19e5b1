"""Task 9a: too few blocks for everybody. Who came last gives way, and comes back as if nothing had happened."""

from __future__ import annotations

from labkit.paged_scheduler import Blocks, PagedRequest, PagedScheduler
from labkit.step_plan import Chunk, StepPlan


class PreemptiveScheduler(PagedScheduler):
    """Runs the requests that came first, as many as fit; each computes in a step all that it knows.

    A request is preempted in one of two ways. By *recompute* it gives its blocks up, and later reads its prompt and
    what it has generated again. By *swap* its blocks are copied to host memory, and later back into whatever blocks
    are free then.

        device   │ running  ──── swap_out ────►  host   │ swapped out
                 │          ◄──── swap_in ─────         │
                 │          ──── recompute ──►  no blocks at all, nothing computed

    Args:
        pool: blocks of the memory that the model computes in.
        block_size: tokens in a block.
        host_pool: blocks in host memory, of the same size; None means that preemption is always by recompute.

    Raises:
        ValueError: `block_size` is not an int of at least 1.

    Source: Kwon et al. 2023 (2309.06180), section 4.5; module section 2.2.
    """

    def __init__(self, pool: Blocks, block_size: int, host_pool: Blocks | None = None) -> None:
        super().__init__(pool, block_size)
        self._host_pool = host_pool

    def schedule(self) -> StepPlan:
        """Decide who runs in the next step, and who gives way.

        Requests are served in order of arrival. Each gets blocks for all its known tokens. While too few are free,
        the request that came last among those with blocks is preempted, in the end the very one that asks. If that
        doesn't help, or there is nobody to preempt, the request waits and so do all that came after it: nobody is
        overtaken. A request whose next token has yet to be appended has nothing to compute and is passed over.

        A preempted request is swapped out if the host pool has room for all its blocks, otherwise recomputed. Host
        blocks that are read back in this step are free only for the next one.

        Returns:
            One chunk for each request that runs, in order of arrival, with all its missing tokens.
        """
        # BEGIN SOLUTION
        chunks: list[Chunk] = []
        swap_out: list[tuple[int, int]] = []
        swap_in: list[tuple[int, int]] = []
        requests = list(self._requests.values())
        for index, request in enumerate(requests):
            if request.num_missing == 0:
                continue
            for victim in reversed(requests[index:]):
                if self._fits(request):
                    break
                swap_out += self._preempt(victim)
            if not self._fits(request):
                break
            request.blocks += self._pool.allocate(self._missing_blocks(request))
            swap_in += zip(request.host_blocks, request.blocks, strict=False)
            request.host_blocks = []
            missing = tuple(request.tokens[request.num_computed :])
            chunks.append(Chunk(request.request_id, request.num_computed, missing, tuple(request.blocks), True))
            request.num_computed = len(request.tokens)
        # Only now: a block that is yet to be read must not be the target of a swap in the same step.
        for host_block, _ in swap_in:
            self._host().free(host_block)
        return StepPlan(tuple(chunks), tuple(swap_out), tuple(swap_in))
        # END SOLUTION

    def _release(self, request: PagedRequest) -> None:
        """Gives back all that a request holds, on the device and on the host."""
        super()._release(request)
        # BEGIN SOLUTION
        for host_block in request.host_blocks:
            self._host().free(host_block)
        request.host_blocks = []
        # END SOLUTION

    # BEGIN SOLUTION
    def _missing_blocks(self, request: PagedRequest) -> int:
        """Blocks that a request needs besides its own to compute all its tokens."""
        return self._blocks_for(len(request.tokens)) - len(request.blocks)

    def _fits(self, request: PagedRequest) -> bool:
        """Whether a request could run with the blocks that are free."""
        return self._missing_blocks(request) <= self._pool.num_free

    def _preempt(self, victim: PagedRequest) -> list[tuple[int, int]]:
        """Takes a request's blocks away; returns the copies to host memory that this calls for."""
        if not victim.blocks:
            return []
        blocks, host_blocks = victim.blocks, []
        if self._host_pool is not None and len(blocks) <= self._host_pool.num_free:
            host_blocks = self._host_pool.allocate(len(blocks))
        else:
            victim.num_computed = 0
        self._release(victim)
        victim.host_blocks = host_blocks
        return list(zip(blocks, host_blocks, strict=False))

    def _host(self) -> Blocks:
        """The host pool; only what was swapped out has blocks there."""
        assert self._host_pool is not None
        return self._host_pool

    # END SOLUTION
