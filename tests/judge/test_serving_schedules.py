"""The oracle for schedulers over blocks: it is content with the reference, and names what a wrong one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from grader.judge.serving_schedules import BudgetSchedule, PreemptionSchedule
from labkit.paged_scheduler import PagedRequest
from labkit.step_plan import StepPlan
from solutions.kv_cache.preemption import PreemptiveScheduler
from solutions.kv_cache.token_budget import TokenBudgetScheduler

STEPS = 10


@pytest.mark.parametrize("seed", range(20))
def test_the_reference_keeps_every_rule(seed: int) -> None:
    PreemptionSchedule(PreemptiveScheduler, seed, wire=False).run(STEPS)
    BudgetSchedule(TokenBudgetScheduler, seed, wire=False).run(STEPS)


def test_a_seed_decides_everything() -> None:
    first, second = (PreemptionSchedule(PreemptiveScheduler, 7, wire=False) for _ in range(2))
    first.run(STEPS)
    second.run(STEPS)
    assert (first.num_steps, first.num_preempted, first.num_added) == (
        second.num_steps, second.num_preempted, second.num_added,
    )  # fmt: skip


class LosesBlocks(PreemptiveScheduler):
    """Gives nothing back when a request leaves."""

    def remove(self, request_id: int) -> None:
        """Forgets the request, and its blocks."""
        del self._requests[request_id]


class KeepsHostBlocks(PreemptiveScheduler):
    """Gives nothing back to the host when a request leaves."""

    def _release(self, request: PagedRequest) -> None:
        host_blocks, request.host_blocks = request.host_blocks, []
        super()._release(request)
        request.host_blocks = host_blocks


class SwapsBackwards(PreemptiveScheduler):
    """Names the host blocks of a swap in another order than it reads them back."""

    def schedule(self) -> StepPlan:
        """The plan, with the targets of the copies out turned round."""
        plan = super().schedule()
        blocks, host_blocks = zip(*plan.swap_out, strict=True) if plan.swap_out else ((), ())
        return replace(plan, swap_out=tuple(zip(blocks, host_blocks[::-1], strict=True)))


class MixesTables(PreemptiveScheduler):
    """Turns a table of several blocks round, so that tokens are read from where they don't lie."""

    def schedule(self) -> StepPlan:
        """The plan, with every other table in the wrong order."""
        plan = super().schedule()
        return replace(
            plan,
            chunks=tuple(replace(c, blocks=c.blocks[::-1]) if c.start % 2 else c for c in plan.chunks),
        )


class Overtakes(PreemptiveScheduler):
    """Serves the newest requests first."""

    def schedule(self) -> StepPlan:
        """A plan in reverse order of arrival."""
        self._requests = dict(reversed(self._requests.items()))
        plan = super().schedule()
        self._requests = dict(reversed(self._requests.items()))
        return plan


class ChoosesTooEarly(TokenBudgetScheduler):
    """Has a token chosen after each piece of a prompt."""

    def schedule(self, token_budget: int | None = None) -> StepPlan:
        """A plan in which every chunk gives a token."""
        plan = super().schedule(token_budget)
        return replace(plan, chunks=tuple(replace(chunk, gives_token=True) for chunk in plan.chunks))


class LosesTurns(TokenBudgetScheduler):
    """Always serves the oldest decodes first."""

    def schedule(self, token_budget: int | None = None) -> StepPlan:
        """A plan without memory of turns."""
        for request in self._requests.values():
            request.last_turn = 0
        return super().schedule(token_budget)


def preempting(scheduler: Callable[..., Any]) -> Callable[[int], None]:
    """Runs a schedule of that scheduler."""
    return lambda seed: PreemptionSchedule(scheduler, seed, wire=False).run(STEPS)


def budgeting(scheduler: Callable[..., Any]) -> Callable[[int], None]:
    """Runs a schedule of that scheduler."""
    return lambda seed: BudgetSchedule(scheduler, seed, wire=False).run(STEPS)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (preempting(LosesBlocks), "was removed and held the blocks"),
        (preempting(KeepsHostBlocks), "host block"),
        (preempting(SwapsBackwards), "reads slot|copied in"),
        (preempting(MixesTables), "reads slot"),
        (preempting(Overtakes), "those that came first"),
        (budgeting(ChoosesTooEarly), "gives_token"),
        (budgeting(LosesTurns), "first who has waited longest"),
    ],
    ids=["blocks", "host", "swap", "tables", "order", "token", "turns"],
)
def test_wrong_schedulers_are_found_out(run: Callable[[int], None], said: str) -> None:
    for seed in range(200):
        try:
            run(seed)
        except AssertionError as error:
            assert any(part in str(error) for part in said.split("|")), str(error)
            return
    raise AssertionError("200 schedules noticed nothing")
