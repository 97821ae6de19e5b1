"""Random schedules under the KV oracle: 50,000 in full, a fifth for each of the reference's owners of blocks.

Each schedule is decided by its own seed, which a failure names; `EVIDENCE_SEED` repeats the whole run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grader.judge.kv_schedules import Schedule
from grader.judge.radix_schedules import RadixSchedule
from grader.judge.serving_schedules import BudgetSchedule, PreemptionSchedule
from labkit.paged_scheduler import PagedRequest
from solutions.kv_cache.block_table import BlockTable
from solutions.kv_cache.blocks import BlockAllocator
from solutions.kv_cache.preemption import PreemptiveScheduler
from solutions.kv_cache.prefix import PrefixCache
from solutions.kv_cache.radix_cache import RadixCache
from solutions.kv_cache.token_budget import TokenBudgetScheduler
from tests.evidence.conftest import Length

REFERENCE = SimpleNamespace(
    BlockAllocator=BlockAllocator, BlockTable=BlockTable, PrefixCache=PrefixCache, RadixCache=RadixCache
)
OPERATIONS = 40
STEPS = 12


def weak_hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """A hash that collides all the time."""
    return bytes([(sum(tokens) + parent[-1]) % 4])


def tables(seed: int) -> dict[str, int]:
    """Allocator and block tables."""
    schedule = Schedule(REFERENCE, seed, cached=False)
    schedule.run(OPERATIONS)
    return {"tokens": schedule.grown, "refused": schedule.refused}


def prefix_cache(seed: int) -> dict[str, int]:
    """With the prefix cache in front of the allocator; the hash of every third schedule is weak."""
    if weak := seed % 3 == 0:
        schedule = Schedule(REFERENCE, seed, True, lambda pool, size: PrefixCache(pool, size, weak_hash))
    else:
        schedule = Schedule(REFERENCE, seed, True)
    schedule.collisions = weak
    schedule.run(OPERATIONS)
    return {"tokens": schedule.grown, "refused": schedule.refused, "hit blocks": schedule.hit_blocks}


def radix_cache(seed: int) -> dict[str, int]:
    """With the radix cache in front of the allocator."""
    schedule = RadixSchedule(REFERENCE, seed)
    schedule.run(OPERATIONS)
    return {"tokens": schedule.grown, "hit blocks": schedule.hit_blocks, "hits within a block": schedule.hit_tails}


def preemption(seed: int) -> dict[str, int]:
    """The scheduler that preempts by recompute and by swap."""
    schedule = PreemptionSchedule(PreemptiveScheduler, seed, wire=False)
    schedule.run(STEPS)
    return {"steps": schedule.num_steps, "preempted": schedule.num_preempted, "swapped": schedule.num_swapped}


def token_budget(seed: int) -> dict[str, int]:
    """The scheduler with a budget of tokens."""
    schedule = BudgetSchedule(TokenBudgetScheduler, seed, wire=False)
    schedule.run(STEPS)
    return {"steps": schedule.num_steps, "preempted": schedule.num_preempted}


@pytest.mark.parametrize("run", [tables, prefix_cache, radix_cache, preemption, token_budget], ids=lambda f: f.__name__)
def test_every_random_schedule_keeps_its_promises(
    run: Callable[[int], dict[str, int]], length: Length, fresh: random.Random
) -> None:
    totals: dict[str, int] = {}
    for _ in range(length.schedules):
        for name, count in run(fresh.getrandbits(32)).items():
            totals[name] = totals.get(name, 0) + count
    print(f"{run.__name__}: {length.schedules} schedules, {', '.join(f'{n} {name}' for name, n in totals.items())}")
    assert all(totals.values()), f"nothing of a kind ever happened, so it wasn't tested: {totals}"


class ForgetsOwners(BlockAllocator):
    """Shares a block without counting."""

    def share(self, block: int) -> None:
        """Counts nothing."""


class KeepsTheCount(PreemptiveScheduler):
    """Believes that the tokens of a preempted request are still computed."""

    def _preempt(self, victim: PagedRequest) -> list[tuple[int, int]]:
        computed = victim.num_computed
        pairs = super()._preempt(victim)
        victim.num_computed = computed
        return pairs


class SpendsMore(TokenBudgetScheduler):
    """Has a token more to give than it should."""

    def schedule(self, token_budget: int | None = None) -> Any:
        """With a budget of its own."""
        return super().schedule((token_budget or self._token_budget) + 1)


@pytest.mark.parametrize(
    ("wrong", "run"),
    [
        (
            ForgetsOwners,
            lambda seed: Schedule(
                SimpleNamespace(BlockAllocator=ForgetsOwners, BlockTable=BlockTable), seed, cached=False
            ).run(OPERATIONS),
        ),
        (KeepsTheCount, lambda seed: PreemptionSchedule(KeepsTheCount, seed, wire=False).run(STEPS)),
        (SpendsMore, lambda seed: BudgetSchedule(SpendsMore, seed, wire=False).run(STEPS)),
    ],
    ids=["owners", "preemption", "budget"],
)
def test_the_schedules_have_power(wrong: type, run: Callable[[int], None], fresh: random.Random) -> None:
    """Wrong implementations fail before the hundredth schedule, or passing would mean little."""
    for number in range(100):
        try:
            run(fresh.getrandbits(32))
        except (AssertionError, ValueError) as error:
            print(f"{wrong.__name__} failed in schedule {number}: {str(error)[:120]}")
            return
    raise AssertionError(f"{wrong.__name__} passed 100 random schedules")
