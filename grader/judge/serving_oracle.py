"""The KV oracle for schedulers over blocks: requests arrive, run, are preempted, come back, and are aborted.

The oracle keeps its own account of who holds which blocks, from what the pools are asked for. It copies and computes
what each plan says, and compares every slot that is read with the reader's own prefix. Who may run is a question of the
scheduler's rules, which `serving_schedules` knows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grader.judge.kv_oracle import Ledger
from grader.judge.refusal import check_refused
from grader.judge.scripted_pool import RecordingPool
from grader.judge.slot_model import VOCAB, next_token
from labkit.step_plan import Chunk, StepPlan


class WatchedPool(RecordingPool):
    """A pool that remembers which blocks were given back since it was last asked."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._given_back: list[int] = []

    def free(self, block: int) -> None:
        """One owner less, noted down."""
        super().free(block)
        self._given_back.append(block)

    def given_back(self) -> list[int]:
        """Blocks freed since the last call."""
        blocks, self._given_back = self._given_back, []
        return blocks


@dataclass(eq=False)
class Served:
    """A request, as the oracle knows it; `blocks` and `host_blocks` are those that it holds."""

    request_id: int
    tokens: list[int]
    max_new_tokens: int
    num_prompt: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    last_turn: int = 0

    @property
    def missing(self) -> int:
        """Tokens that are known, but not computed."""
        return len(self.tokens) - self.computed


MakeScheduler = Callable[[Any, int, Any], Any]
"""Builds a scheduler from pool, block size, and host pool or None."""


class ServingSchedule:
    """One random schedule; subclasses know the rules of a scheduler.

    Args:
        make: builds the scheduler.
        seed: decides everything.
        wire: pools are handed over as specs, as the lab fixture needs them; False gives the pools that these build.
    """

    def __init__(self, make: MakeScheduler, seed: int, wire: bool = True) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice([1, 2, 3, 4, 5, 8])
        self.num_blocks = self.random.randint(2, 8)
        self.pool = WatchedPool(self.num_blocks)
        self.host = WatchedPool(self.random.choice([1, 2, 4, 12])) if self.has_host() else None
        self.ledger = Ledger((self.num_blocks + (len(self.host.owners) if self.host else 0)) * self.block_size)
        pools = [pool and (pool.spec() if wire else pool.spec().build()) for pool in (self.pool, self.host)]
        self.scheduler = make(pools[0], self.block_size, pools[1])
        self.shared = [self._some_tokens(3 * self.block_size) for _ in range(2)]
        self.alive: dict[int, Served] = {}
        self.num_added = self.num_steps = self.num_turns = self.num_preempted = self.num_swapped = 0
        self.where = f"seed {seed}, {self.num_blocks} blocks of {self.block_size}"

    def has_host(self) -> bool:
        """Whether there is host memory to swap to."""
        return False

    def plan(self) -> StepPlan:
        """Asks the scheduler for the next step."""
        plan: StepPlan = self.scheduler.schedule()
        return plan

    def check_rules(self, plan: StepPlan, before: list[Served], held: dict[int, int], lost: list[Served]) -> None:
        """Checks who runs; `held` has the blocks of each request before the step, `lost` who was preempted."""
        raise NotImplementedError

    def run(self, num_steps: int) -> None:
        """Serves requests that come and go for some steps, then all that are left; checks that the pool is whole.

        Raises:
            AssertionError: at the first broken rule, with the step that showed it.
        """
        try:
            self._arrive()
            for _ in range(num_steps):
                for action, chance in ((self._arrive, 0.7), (self._abort, 0.1), (self._misuse, 0.1)):
                    if self.random.random() < chance:
                        action()
                self._step()
            # Each step gives the oldest request a token before long; what takes longer than this never ends.
            most = 20 + 4 * sum(request.missing + request.max_new_tokens for request in self.alive.values())
            while self.alive:
                assert most > 0, f"requests {list(self.alive)} don't come to an end"
                most -= 1
                self._step()
            assert not self._step().chunks, "all requests have left, but something is computed"
            self._check_account()
        except AssertionError as error:
            raise AssertionError(f"{self.where}, step {self.num_steps}: {error}") from error

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return len({position // self.block_size for position in range(num_tokens)})

    def _some_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def _arrive(self) -> None:
        size = self.random.randint(1, min(2 * self.block_size, 9))
        prompt = self.random.choice(self.shared)[: self.random.randint(0, size - 1)]
        prompt = prompt + self._some_tokens(size - len(prompt))
        room = self.num_blocks * self.block_size - size + 1
        new = self.random.choice([1, self.block_size, 2 * self.block_size + 1, room, room])
        if new > room:
            check_refused(
                f"a prompt of {size} and {new} new tokens in {self.num_blocks} blocks of {self.block_size}",
                lambda: self.scheduler.add(self.num_added, prompt, new),
            )
            return
        self.scheduler.add(self.num_added, prompt, new)
        self.alive[self.num_added] = Served(self.num_added, prompt, new, size)
        self.num_added += 1

    def _abort(self) -> None:
        if self.alive:
            self._remove(self.random.choice(list(self.alive.values())))
            self._check_account()

    def _remove(self, request: Served) -> None:
        self.scheduler.remove(request.request_id)
        self._check_given_back(request, "was removed")
        if self.host is not None:
            given = sorted(self.host.given_back())
            assert given == sorted(request.host_blocks), (
                f"request {request.request_id} was removed and held the host blocks {request.host_blocks}, but given "
                f"back were {given}"
            )
        del self.alive[request.request_id]

    def _check_given_back(self, request: Served, what: str) -> None:
        given = self.pool.given_back()
        assert sorted(given) == sorted(request.blocks), (
            f"request {request.request_id} {what} and held the blocks {request.blocks}, but given back were {given}"
        )

    def _misuse(self) -> None:
        free, count = self.pool.num_free(), self.scheduler.num_requests
        check_refused("a request that nobody knows, removed", lambda: self.scheduler.remove(self.num_added + 7))
        for request in list(self.alive.values())[:2]:
            check_refused("an id in use", lambda r=request: self.scheduler.add(r.request_id, [1], 1))  # type: ignore[misc]
            if request.missing:
                check_refused(
                    f"a token for request {request.request_id}, which has {request.missing} tokens to compute",
                    lambda r=request: self.scheduler.append(r.request_id, 0),  # type: ignore[misc]
                )
        after = (self.pool.num_free(), self.scheduler.num_requests)
        assert after == (free, count), f"refused calls changed (free blocks, requests) from {(free, count)} to {after}"

    def _step(self) -> StepPlan:
        before = list(self.alive.values())
        held = {request.request_id: len(request.blocks) for request in before}
        self.pool.given_back()
        plan = self.plan()
        assert isinstance(plan, StepPlan), f"schedule must return a StepPlan, got {plan!r}"
        ids = [chunk.request_id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids) and set(ids) <= set(self.alive), (
            f"the plan has chunks of requests {ids}; alive are {list(self.alive)}, and each has one chunk at most"
        )
        lost = self._preempted(ids)
        self._swap(plan, lost)
        for chunk in plan.chunks:
            self._check_form(chunk)
        # All are written before anybody reads: they share one pass.
        for chunk in plan.chunks:
            request = self.alive[chunk.request_id]
            end = chunk.start + len(chunk.tokens)
            self.ledger.write(self._slots(chunk, end)[chunk.start :], self._numbers(request, end)[chunk.start :])
        for chunk in plan.chunks:
            request = self.alive[chunk.request_id]
            request.computed = end = chunk.start + len(chunk.tokens)
            request.blocks = list(chunk.blocks)
            self.ledger.read(f"request {chunk.request_id}", self._slots(chunk, end), self._numbers(request, end))
        self._check_account()
        if any(request.missing for request in before):
            assert plan.chunks, f"nothing runs, though requests {list(self.alive)} wait for tokens"
        self.check_rules(plan, before, held, lost)
        for chunk in plan.chunks:
            self.num_turns += 1
            self.alive[chunk.request_id].last_turn = self.num_turns
            if chunk.gives_token:
                self._advance(self.alive[chunk.request_id])
        self.num_steps += 1
        return plan

    def _slots(self, chunk: Chunk, end: int) -> list[int]:
        return [chunk.blocks[i // self.block_size] * self.block_size + i % self.block_size for i in range(end)]

    def _numbers(self, request: Served, end: int) -> list[int]:
        return self.ledger.numbers(request.tokens[:end])

    def _preempted(self, ids: list[int]) -> list[Served]:
        """Who gave up blocks in this step, in order of arrival; their blocks must all be given back."""
        given = self.pool.given_back()
        lost = [request for request in self.alive.values() if request.blocks and set(request.blocks) & set(given)]
        blocks = {block for request in lost for block in request.blocks}
        kept = {block for request in self.alive.values() for block in request.blocks} - blocks
        assert blocks <= set(given) and not kept & set(given), (
            f"blocks given back in this step are {given}; requests {[r.request_id for r in lost]} held "
            f"{sorted(blocks)}, others {sorted(kept)}"
        )
        for request in lost:
            assert request.request_id not in ids, (
                f"request {request.request_id} gave up its blocks and runs in the same step"
            )
        self.num_preempted += len(lost)
        return lost

    def _swap(self, plan: StepPlan, lost: list[Served]) -> None:
        """Makes the plan's copies; afterwards `lost` hold host blocks, or nothing."""
        out, into = list(plan.swap_out), list(plan.swap_in)
        room = 0 if self.host is None else self.host.num_free() + len(out) - len(into)
        for request in reversed(lost):
            pairs = [pair for pair in out if pair[0] in request.blocks]
            if len(request.blocks) > room:
                assert not pairs, f"request {request.request_id} is swapped out, but the host has {room} blocks free"
                request.computed = 0
            else:
                assert [block for block, _ in pairs] == request.blocks, (
                    f"request {request.request_id} gave up the blocks {request.blocks} and the host has {room} free, "
                    f"but copied out are {pairs}"
                )
                request.host_blocks = [host_block for _, host_block in pairs]
                room -= len(pairs)
                self.num_swapped += 1
            out = [pair for pair in out if pair not in pairs]
            request.blocks = []
        assert not out, f"copied out are {out}, which belong to nobody who was preempted"
        for block, host_block in plan.swap_out:
            self.ledger.copy(block, self.num_blocks + host_block, self.block_size)
        for chunk in plan.chunks:
            request = self.alive[chunk.request_id]
            wanted = list(zip(request.host_blocks, chunk.blocks, strict=False))
            own = [pair for pair in into if pair[0] in request.host_blocks]
            assert own == wanted, (
                f"request {chunk.request_id} has host blocks {request.host_blocks} and now the blocks {chunk.blocks}; "
                f"copied in are {own}"
            )
            into = [pair for pair in into if pair not in own]
            request.host_blocks = []
        assert not into, f"copied in are {into}, which belong to nobody who runs"
        for host_block, block in plan.swap_in:
            self.ledger.copy(self.num_blocks + host_block, block, self.block_size)
        if self.host is not None:
            self.host.given_back()

    def _check_form(self, chunk: Chunk) -> None:
        """A chunk holds the next tokens of its request, and exactly the blocks for them."""
        request = self.alive[chunk.request_id]
        end = chunk.start + len(chunk.tokens)
        assert chunk.start == request.computed, (
            f"request {chunk.request_id}: {request.computed} tokens are computed, the chunk starts at {chunk.start}"
        )
        assert chunk.tokens and list(chunk.tokens) == request.tokens[chunk.start : end], (
            f"request {chunk.request_id} knows {request.tokens}; the chunk from {chunk.start} on holds {chunk.tokens}"
        )
        assert len(chunk.blocks) == self.blocks_for(end), (
            f"request {chunk.request_id}: {end} tokens with blocks of {self.block_size} need {self.blocks_for(end)} "
            f"blocks, the plan has {chunk.blocks}"
        )
        assert chunk.gives_token is (end == len(request.tokens)), (
            f"request {chunk.request_id} knows {len(request.tokens)} tokens and the chunk ends with token {end}, but "
            f"gives_token is {chunk.gives_token}"
        )

    def _advance(self, request: Served) -> None:
        """The token after the newest one is chosen; after its last one a request leaves."""
        token = next_token(request.tokens)
        if len(request.tokens) + 1 - request.num_prompt == request.max_new_tokens:
            self._remove(request)
        else:
            self.scheduler.append(request.request_id, token)
            request.tokens = [*request.tokens, token]

    def _check_account(self) -> None:
        """Each block has one owner or none, and is held by one request or none."""
        for name, pool, of in (("block", self.pool, "blocks"), ("host block", self.host, "host_blocks")):
            if pool is None:
                continue
            holders: dict[int, int] = {}
            for request in self.alive.values():
                for block in getattr(request, of):
                    assert block not in holders, (
                        f"{name} {block} belongs to requests {holders[block]} and {request.request_id}"
                    )
                    holders[block] = request.request_id
            taken = sorted(block for block, owners in pool.owners.items() if owners)
            assert taken == sorted(holders), f"{name}s taken are {taken}, held by requests are {sorted(holders)}"
            assert all(owners <= 1 for owners in pool.owners.values()), f"a {name} has two owners: {pool.owners}"
