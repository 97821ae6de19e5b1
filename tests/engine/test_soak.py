"""Thousands of requests, many of them cut short or malformed, on a pool that is always too small."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.async_engine import AsyncEngine
from solutions.engine.grammar import Constraint
from solutions.engine.scheduler import SchedulerConfig
from tests.engine.memory_trend import MemoryTrend

WAVE, NUM_WAVES = 100, 10
"""Requests; twice, since there are two ways to preempt."""
MOST_AT_ONCE = 24


async def one_client(engine: AsyncEngine, choose: random.Random, counts: dict[str, int]) -> None:
    """One request: served, given up half way, cancelled from outside, or wrong from the start."""
    shared = [11, 12, 13, 14, 15, 16, 17, 18][: choose.randint(0, 8)]
    prompt = shared + [choose.randrange(49_000) for _ in range(choose.randint(1, 20))]
    params = SamplingParams(
        temperature=choose.choice([0.0, 0.8]), seed=choose.randrange(100), max_tokens=choose.randint(1, 12),
        n=choose.choice([1, 1, 1, 2]), logprobs=choose.choice([None, None, 2]),
    )  # fmt: skip
    kind = choose.choice(["served", "served", "left", "cancelled", "malformed", "constrained"])
    constraint = Constraint("regex", "[a-c]{1,4}") if kind == "constrained" else None
    if kind == "malformed":
        prompt = choose.choice([[], [-1], [60_000], [1] * 2000])
    stream = engine.stream(prompt, params, priority=choose.choice([0, 0, 1]), constraint=constraint)
    try:
        if kind == "cancelled":
            await asyncio.wait_for(_read(stream), timeout=choose.random() * 0.05)
        elif kind == "left":
            async for _ in stream:
                if choose.random() < 0.5:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
        else:
            await _read(stream)
        counts[kind] += 1
    except ValueError:
        assert kind == "malformed"
        counts["refused"] += 1
    except TimeoutError:
        counts["timed out"] += 1


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


async def soak(engine: Engine, counts: dict[str, int], trend: MemoryTrend) -> None:
    """All clients, so many at once; after each wave everything must be as it was."""
    choose = random.Random(7)
    serving = AsyncEngine(engine)
    places = asyncio.Semaphore(MOST_AT_ONCE)

    async def guarded() -> None:
        async with places:
            await one_client(serving, random.Random(choose.random()), counts)

    for wave in range(1, NUM_WAVES + 1):
        await asyncio.gather(*(guarded() for _ in range(WAVE)))
        while serving.num_streams:
            await asyncio.sleep(0.01)
        await serving.ask(Engine.check_idle)
        trend.sample(wave * WAVE)
    assert serving.error is None
    await serving.shut_down(patience=20)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_soak_ends_with_an_intact_pool_and_flat_memory(
    tiny_model: Any, preemption: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tiny_model, EngineConfig(
        SchedulerConfig(max_running=12, token_budget=48, max_context=64, preemption=preemption), num_blocks=18,
        block_size=4, num_host_blocks=16, prefix_cache="hash" if preemption == "recompute" else "radix",
        speculation="lookahead" if preemption == "recompute" else "n-gram",
    ))  # fmt: skip
    counts = dict.fromkeys(("served", "left", "cancelled", "malformed", "constrained", "refused", "timed out"), 0)
    trend = MemoryTrend()
    asyncio.run(soak(engine, counts, trend))
    engine.check_idle()
    assert sum(counts.values()) == WAVE * NUM_WAVES
    assert all(counts[kind] > 20 for kind in ("served", "left", "constrained", "refused")), counts
    assert engine.metrics.num_preemptions > 20
    # Whoever is cancelled before the engine knows of them leaves no trace either.
    assert not caplog.records, caplog.text
    print(trend.check())
