"""Streams of an engine in a thread of its own: whoever comes or goes at a bad moment, nobody else is held up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from solutions.engine import Engine, SamplingParams
from solutions.engine.async_engine import AsyncEngine, EngineFailed

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PATIENCE = 10.0
"""Seconds after which a stream counts as one that never ends."""


async def read(engine: AsyncEngine, prompt: list[int], **settings: Any) -> int:
    """Tokens of a whole answer."""
    total = 0
    async for item in engine.stream(prompt, GREEDY, **settings):
        total += len(item.tokens)
    return total


async def until(happened: threading.Event) -> None:
    """Waits for what the engine's thread tells."""
    assert await asyncio.to_thread(happened.wait, PATIENCE)


class Gate:
    """Holds an engine's steps up until it is opened.

    Args:
        engine: whose they are.
        error: what a step raises then; None to go on.
    """

    def __init__(self, engine: Engine, error: Exception | None = None) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        step = engine.step

        def held() -> Any:
            self.reached.set()
            assert self.opened.wait(PATIENCE)
            if error is not None:
                raise error
            return step()

        engine.step = held  # type: ignore[method-assign]


def test_a_name_that_is_free_again_belongs_to_whoever_takes_it(make_engine: Any) -> None:
    async def serve() -> None:
        serving = AsyncEngine(make_engine())
        first = serving.stream([1, 2], GREEDY, request_id="name")
        while (await anext(first)).completion is None:
            pass
        # The first has its answer, and has not been let go of yet.
        second = asyncio.ensure_future(read(serving, [3], request_id="name"))
        await asyncio.sleep(0)
        await first.aclose()  # type: ignore[attr-defined]
        assert await asyncio.wait_for(second, PATIENCE) == GREEDY.max_tokens
        await serving.shut_down(PATIENCE)

    asyncio.run(serve())


def test_who_comes_while_the_last_step_fails_is_told(make_engine: Any) -> None:
    async def serve() -> None:
        engine = make_engine()
        gate = Gate(engine, RuntimeError("broken"))
        serving = AsyncEngine(engine)
        early = asyncio.ensure_future(read(serving, [1]))
        await until(gate.reached)
        late = asyncio.ensure_future(read(serving, [2]))
        await asyncio.sleep(0.01)
        gate.opened.set()
        for stream in (early, late, asyncio.ensure_future(read(serving, [3]))):
            with pytest.raises(EngineFailed, match="broken"):
                await asyncio.wait_for(stream, PATIENCE)

    asyncio.run(serve())


def test_a_loop_that_is_closed_leaves_others_served(make_engine: Any) -> None:
    engine = make_engine()
    gate = Gate(engine)
    serving = AsyncEngine(engine)

    async def go_away() -> None:
        stream = asyncio.ensure_future(read(serving, [1]))
        await until(gate.reached)
        stream.cancel()

    asyncio.run(go_away())  # its loop is closed, and a step for it is under way
    gate.opened.set()

    async def stay() -> None:
        assert await asyncio.wait_for(read(serving, [2]), PATIENCE) == GREEDY.max_tokens
        await serving.shut_down(PATIENCE)

    asyncio.run(stay())
    engine.check_idle()
