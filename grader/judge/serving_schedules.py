"""The rules of the schedulers over blocks, checked in every step of random schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from grader.judge.serving_oracle import Served, ServingSchedule
from labkit.step_plan import StepPlan


class PreemptionSchedule(ServingSchedule):
    """A schedule for `PreemptiveScheduler`, half of them with host memory."""

    def has_host(self) -> bool:
        """Decided by the seed."""
        return self.random.random() < 0.5

    def check_rules(self, plan: StepPlan, before: list[Served], held: dict[int, int], lost: list[Served]) -> None:
        """The oldest requests run, as many as fit into the pool, each with all its tokens."""
        total, wanted = 0, []
        for request in before:
            total += self.blocks_for(request.computed + request.missing)
            if total > self.num_blocks:
                break
            wanted.append(request.request_id)
        ids = [chunk.request_id for chunk in plan.chunks]
        assert ids == wanted, (
            f"requests {ids} run, should be {wanted}: those that came first, in this order, as many as fit into "
            f"{self.num_blocks} blocks; by arrival they need "
            f"{[(r.request_id, self.blocks_for(r.computed + r.missing)) for r in before]}"
        )
        for request in before:
            assert request.request_id in ids or not request.blocks, (
                f"request {request.request_id} doesn't run and holds blocks {request.blocks}"
            )
            assert request.request_id not in ids or request.missing == 0, (
                f"request {request.request_id} runs, and {request.missing} tokens are missing afterwards"
            )


class BudgetSchedule(ServingSchedule):
    """A schedule for `TokenBudgetScheduler`.

    Args:
        make: builds the scheduler; called as `make(pool, block_size, token_budget, max_chunk)`.
        seed: decides everything.
        wire: as for `ServingSchedule`.
    """

    def __init__(self, make: Callable[[Any, int, int, int | None], Any], seed: int, wire: bool = True) -> None:
        rng = random.Random(f"budget {seed}")
        self.usual_budget, self.max_chunk = rng.randint(1, 12), rng.choice([None, None, 1, 2, 3, 5])
        self.budget = self.usual_budget
        super().__init__(lambda pool, size, _: make(pool, size, self.usual_budget, self.max_chunk), seed, wire)
        self.where += f", budget {self.usual_budget}, chunks of at most {self.max_chunk}"

    def plan(self) -> StepPlan:
        """Now and then a step has a budget of its own."""
        own = self.random.randint(1, 12) if self.random.random() < 0.2 else None
        self.budget = self.usual_budget if own is None else own
        self.missing = {request.request_id: request.missing for request in self.alive.values()}
        plan: StepPlan = self.scheduler.schedule() if own is None else self.scheduler.schedule(own)
        return plan

    def check_rules(self, plan: StepPlan, before: list[Served], held: dict[int, int], lost: list[Served]) -> None:
        """Decodes first, then prefills as they came; the budget is kept, and used as far as blocks allow."""
        counts = {chunk.request_id: len(chunk.tokens) for chunk in plan.chunks}
        total = sum(counts.values())
        assert total <= self.budget, f"the step computes {total} tokens {counts}, its budget is {self.budget}"
        waiting = [request for request in before if self.missing[request.request_id]]
        decodes = [r for r in waiting if self.missing[r.request_id] == 1 and held[r.request_id]]
        prefills = [r for r in waiting if r not in decodes]
        self._check_order(plan, decodes, prefills, lost, total)
        if lost:
            self._check_victims(plan, before, held, lost)
        else:
            self._check_counts(counts, decodes, prefills, total)

    def _most(self, request: Served) -> int:
        """The most tokens that a request could be given, budget aside."""
        return min(self.missing[request.request_id], self.max_chunk or self.budget)

    def _check_order(
        self, plan: StepPlan, decodes: list[Served], prefills: list[Served], lost: list[Served], total: int
    ) -> None:
        ids = [chunk.request_id for chunk in plan.chunks]
        decode_ids = [r.request_id for r in decodes]
        first = [request_id in decode_ids for request_id in ids]
        assert first == sorted(first, reverse=True), f"the chunks are of {ids}; decodes {decode_ids} come first"
        for request in decodes:
            assert request.request_id in ids or request in lost or total == self.budget, (
                f"request {request.request_id} decodes and gets no token, though {total} of {self.budget} are used"
            )
        ran = [r for r in prefills if r.request_id in ids]
        assert [i for i in ids if i not in decode_ids] == [r.request_id for r in ran], (
            f"prefills are given tokens as {ids}, they arrived as {[r.request_id for r in prefills]}"
        )
        for older in prefills[: prefills.index(ran[-1])] if ran else []:
            assert older in ran or older in lost, (
                f"prefill {older.request_id} was overtaken: {[r.request_id for r in ran]} run, which came later"
            )

    def _check_victims(self, plan: StepPlan, before: list[Served], held: dict[int, int], lost: list[Served]) -> None:
        first = before.index(lost[0])
        spared = [r.request_id for r in before[first:] if held[r.request_id] and r not in lost]
        assert not spared, f"request {lost[0].request_id} gave up its blocks, but {spared} came later and kept theirs"
        started = [chunk.request_id for chunk in plan.chunks if held[chunk.request_id] == 0]
        assert not started, f"requests {started} start in a step in which blocks ran out"
        # Whoever asked for blocks, the last victim's were needed: for one that came before it, or for its own chunk.
        kept = held[lost[0].request_id]
        own = min(self.missing[lost[0].request_id], self.max_chunk or self.budget)
        computed = len(lost[0].tokens) - self.missing[lost[0].request_id]
        need = max(0, self.blocks_for(computed + own) - kept)
        assert self.pool.num_free() < kept + need, (
            f"request {lost[0].request_id} gave up {kept} blocks and needed {need} more, yet {self.pool.num_free()} "
            "are free after the step: it was preempted for nothing"
        )

    def _check_counts(self, counts: dict[int, int], decodes: list[Served], prefills: list[Served], total: int) -> None:
        turn = sorted(decodes, key=lambda request: request.last_turn)
        wanted = [request.request_id for request in turn[: self.budget]]
        ran = [request_id for request_id in counts if any(r.request_id == request_id for r in decodes)]
        assert ran == wanted, (
            f"of the decodes {[(r.request_id, r.last_turn) for r in turn]} (request, number of its last turn) {ran} "
            f"run, should be {wanted} with a budget of {self.budget}: first who has waited longest"
        )
        left = self.budget - len(ran)
        for request in prefills:
            count, most = counts.get(request.request_id, 0), min(self._most(request), left)
            if count == 0:
                need = self.blocks_for(request.computed + most) - len(request.blocks)
                assert left == 0 or need > self.pool.num_free(), (
                    f"prefill {request.request_id} is given nothing, though {left} tokens and {self.pool.num_free()} "
                    f"blocks are left and it needs {need}"
                )
                return
            assert count == most, (
                f"prefill {request.request_id} misses {self.missing[request.request_id]} tokens and is given {count}, "
                f"should be given {most}: what is left of the budget is {left}, a chunk has at most {self.max_chunk}"
            )
            left -= count
