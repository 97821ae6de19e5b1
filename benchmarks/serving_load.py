"""Loads on whatever answers requests: open, where requests come at their own times, and closed, where so many run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from solutions.engine.load import Arrival, LoadReport, Served


class Contender(Protocol):
    """Who answers."""

    name: str

    def answer(self, arrival: Arrival) -> AsyncIterator[None]:
        """Yields once for each piece of the answer that comes.

        Raises:
            WrongAnswer: it ended otherwise than with all the tokens that were asked for.
        """
        ...


class WrongAnswer(RuntimeError):
    """A contender did other work than it was asked for; its times would mean nothing."""


def check_length(name: str, arrival: Arrival, prompt_tokens: int, answer_tokens: int) -> None:
    """Refuses an answer to another prompt, or of another length, than was asked for.

    Raises:
        WrongAnswer: so it is.
    """
    wanted = (len(arrival.prompt), arrival.params.max_tokens)
    if (prompt_tokens, answer_tokens) != wanted:
        raise WrongAnswer(f"{name} read and wrote {prompt_tokens} and {answer_tokens} tokens, asked for {wanted}")


async def open_loop(contender: Contender, arrivals: Sequence[Arrival], done: Callable[[], object]) -> LoadReport:
    """Sends each request when it is due, whatever has become of the others; time runs from when it was due.

    Args:
        contender: with nothing to do.
        arrivals: in any order.
        done: called after each answer.
    """
    start = time.monotonic()

    async def one(arrival: Arrival) -> Served:
        due = start + arrival.seconds
        await asyncio.sleep(due - time.monotonic())
        served = await _timed(contender, arrival, due)
        done()
        return served

    served = await asyncio.gather(*(one(arrival) for arrival in arrivals))
    return LoadReport(tuple(served), time.monotonic() - start)


async def closed_loop(
    contender: Contender, arrivals: Sequence[Arrival], concurrency: int, done: Callable[[], object]
) -> LoadReport:
    """Keeps so many requests running until none is left; their own times of arrival play no part.

    Args:
        contender: with nothing to do.
        arrivals: sent in this order.
        concurrency: requests at once.
        done: called after each answer.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(arrival: Arrival) -> Served:
        async with places:
            served = await _timed(contender, arrival, time.monotonic())
        done()
        return served

    start = time.monotonic()
    served = await asyncio.gather(*(one(arrival) for arrival in arrivals))
    return LoadReport(tuple(served), time.monotonic() - start)


async def _timed(contender: Contender, arrival: Arrival, due: float) -> Served:
    first = None
    async for _ in contender.answer(arrival):
        first = first or time.monotonic()
    end = time.monotonic()
    return Served((first or end) - due, end - due, arrival.params.max_tokens)
