"""The benchmark of servers: its loads, its tables, and that all sides do the work they are asked for."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack

import httpx
import pytest

from benchmarks.serving import Plan
from benchmarks.serving_contenders import continuous_batching, engine_server, llama_cpp_server
from benchmarks.serving_load import Contender, WrongAnswer, check_length, closed_loop, open_loop
from benchmarks.serving_tables import Reports, latency_tables, ratios, throughput_rows
from solutions.engine import SamplingParams
from solutions.engine.load import Arrival, LoadReport, Served, random_load

ARRIVALS = [Arrival(0.01 * number, (5, 6), SamplingParams(max_tokens=2)) for number in range(6)]


class Scripted:
    """Answers nobody before so many have asked, and counts who is there.

    Args:
        gathering: so many.
        busy: seconds in which the first one asked keeps everything from running.
    """

    name = "scripted"

    def __init__(self, gathering: int, busy: float = 0.0) -> None:
        self._gathering, self._busy = gathering, busy
        self._enough = asyncio.Event()
        self.asked = self.now = self.most = 0

    async def answer(self, arrival: Arrival) -> AsyncIterator[None]:
        if not self.asked:
            time.sleep(self._busy)
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        if self.asked >= self._gathering:
            self._enough.set()
        await self._enough.wait()
        yield
        await asyncio.sleep(0)
        yield
        self.now -= 1


def test_an_open_loop_waits_for_nobody_and_counts_from_when_a_request_was_due() -> None:
    contender, done = Scripted(gathering=6, busy=0.3), []
    report = asyncio.run(asyncio.wait_for(open_loop(contender, ARRIVALS, lambda: done.append(1)), 30))
    assert contender.most == len(done) == len(report.served) == 6
    # Requests 1 to 5 were due at 10 to 50 ms, and could not be sent before 300 ms.
    assert all(one.ttft >= 0.3 - 0.05 for one in report.served)
    assert all(one.ttft <= one.e2e <= report.seconds for one in report.served)
    assert report.throughput == pytest.approx(12 / report.seconds)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_closed_loop_keeps_so_many_running_and_no_more(concurrency: int) -> None:
    contender = Scripted(gathering=concurrency)
    report = asyncio.run(asyncio.wait_for(closed_loop(contender, ARRIVALS, concurrency, lambda: None), 30))
    assert contender.most == concurrency
    assert len(report.served) == contender.asked == 6


def test_other_work_than_was_asked_for_is_no_result() -> None:
    check_length("one", ARRIVALS[0], 2, 2)
    for prompt, answer in ((2, 1), (2, 3), (0, 2)):
        with pytest.raises(WrongAnswer, match=f"{prompt} and {answer} tokens"):
            check_length("one", ARRIVALS[0], prompt, answer)


def test_all_sides_read_and_write_what_they_are_asked_for() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("not verified here: xllamacpp is not installed")
    arrivals = random_load(3, None, 8, 4, 0.5, 49_000, seed=2)
    too_long = Arrival(0.0, (7,) * 9000, SamplingParams(max_tokens=1))

    async def serve() -> dict[str, LoadReport]:
        async with httpx.AsyncClient(timeout=60) as client:
            with ExitStack() as stack:
                servers = [engine_server(client, 1), llama_cpp_server(client, 1, slots=2, context=256)]
                sides: list[Contender] = [stack.enter_context(one) for one in (*servers, continuous_batching(1))]
                for side in sides[:2]:
                    with pytest.raises(WrongAnswer, match="400"):
                        await closed_loop(side, [too_long], 1, lambda: None)
                return {side.name: await closed_loop(side, arrivals, 2, lambda: None) for side in sides}

    reports = asyncio.run(serve())
    assert set(reports) == {"the engine", "llama.cpp", "transformers"}
    for report in reports.values():
        assert sum(one.num_tokens for one in report.served) == sum(one.params.max_tokens for one in arrivals)
        assert all(0 < one.ttft < one.e2e for one in report.served)


def test_tables_show_medians_and_ratios_within_a_repeat() -> None:
    def report(scale: float) -> LoadReport:
        return LoadReport((Served(scale, 3 * scale, 3), Served(2 * scale, 4 * scale, 3)), 6 * scale)

    reports: Reports = {"the engine": [report(1.0), report(2.0)], "peer": [report(2.0), report(8.0)]}
    assert ratios(reports, "peer", lambda one: one.throughput) == [2.0, 4.0]
    ours, theirs = throughput_rows(reports, "8 at once, ")
    assert ours == "| 8 at once, the engine | 0.75 (0.50 to 1.00) |  |"
    assert theirs == "| 8 at once, peer | 0.31 (0.12 to 0.50) | 3.00 (2.00 to 4.00) |"
    lines = list(latency_tables(reports, slo_ttft=2.0, slo_tpot=1.0))
    assert lines[3].startswith("| the engine | 1.500 | 3.000 | 3.000 | 1.500 |")
    # All of the peer's requests miss the limits: it has no goodput to divide by.
    assert lines[-1].startswith("| the engine / peer | 0.38 (0.25 to 0.50) |")
    assert lines[-1].endswith("| 3.00 (2.00 to 4.00) | – |")


def test_a_plan_makes_room_for_its_longest_text() -> None:
    plan = Plan(num_output=400)
    for seed in range(20):
        for one in random_load(20, None, 800, 400, 0.5, 100, seed):
            assert len(one.prompt) + one.params.max_tokens <= plan.context
