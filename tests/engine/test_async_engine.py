"""Streams of several clients: what one of them does never touches another's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from solutions.engine import Engine, SamplingParams
from solutions.engine.async_engine import AsyncEngine, EngineFailed

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture
def serving(make_engine: Any) -> Iterator[AsyncEngine]:
    """Afterwards nobody may be served any more."""
    engine = AsyncEngine(make_engine())
    yield engine
    until = time.monotonic() + 5
    while engine.num_streams and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.num_streams == 0 and engine.error is None
    asyncio.run(engine.ask(Engine.check_idle))
    asyncio.run(engine.shut_down(patience=5))


async def count(engine: AsyncEngine, **named: Any) -> int:
    """Tokens of a whole stream."""
    async with asyncio.timeout(20):
        return sum([len(one.tokens) async for one in engine.stream([6], LONG, **named)])


def test_whoever_leaves_late_does_not_end_the_next_of_its_name(serving: AsyncEngine) -> None:
    async def main() -> int:
        first = serving.stream([5], SamplingParams(max_tokens=1, ignore_eos=True), request_id="x")
        assert (await anext(first)).completion is not None
        second = asyncio.create_task(count(serving, request_id="x"))
        while not await serving.ask(lambda engine: engine.has_work):
            await asyncio.sleep(0.001)
        await first.aclose()  # type: ignore[attr-defined]
        return await second

    assert asyncio.run(main()) == 60


def test_a_loop_that_was_closed_ends_its_own_streams_only(serving: AsyncEngine) -> None:
    loop = asyncio.new_event_loop()
    left = serving.stream([5], LONG)
    loop.run_until_complete(anext(left))
    loop.close()
    assert asyncio.run(count(serving)) == 60
    assert serving.error is None


def test_loops_in_several_threads_are_served_alike(serving: AsyncEngine) -> None:
    found: list[list[tuple[int, ...]]] = []

    async def one(seed: int) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=10, seed=seed, ignore_eos=True)
        return tuple([token async for piece in serving.stream([5], params) for token in piece.tokens])

    async def client() -> None:
        found.append(list(await asyncio.gather(*map(one, range(3)))))

    threads = [threading.Thread(target=asyncio.run, args=(client(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(found) == 3 and found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3


def test_who_comes_while_the_last_step_fails_is_told(make_engine: Any) -> None:
    engine = make_engine()
    reached, opened = threading.Event(), threading.Event()

    def fail() -> Any:
        reached.set()
        assert opened.wait(10)
        raise RuntimeError("broken")

    async def main() -> None:
        engine.step = fail
        serving = AsyncEngine(engine)
        early = asyncio.create_task(count(serving))
        assert await asyncio.to_thread(reached.wait, 10)
        late = asyncio.create_task(count(serving))
        await asyncio.sleep(0.01)
        opened.set()
        for stream in (early, late, asyncio.create_task(count(serving))):
            with pytest.raises(EngineFailed, match="broken"):
                await stream

    asyncio.run(main())
