"""Thousands of requests to the real model through the real server, many of them cut short or malformed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from solutions.engine import Engine, EngineConfig
from solutions.engine.drafting.speculation import SpeculationConfig
from solutions.engine.scheduler import SchedulerConfig
from solutions.engine.server.server_config import ServerConfig
from solutions.speculative.ngram import NgramDrafter
from tests.engine.memory_trend import MemoryTrend
from tests.engine.running_server import Running, start
from tests.evidence.conftest import Length

WAVE = 100
"""Requests, after which everything must be as before them."""
MOST_AT_ONCE, MOST_SERVED = 24, 20
"""Clients, and requests that the server takes at once: some are told to come back."""
CONTEXT = 64
VOCAB_SIZE = 49_152
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
CONSTRAINED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def body(choose: random.Random) -> dict[str, Any]:
    """A completion that the server will take: short, so that two thousand of them end in minutes."""
    shared = [504, 2365, 260, 655][: choose.randint(0, 4)]
    return {
        "model": "smollm2", "prompt": [*shared, *(choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(1, 8)))],
        "max_tokens": choose.randint(1, 8), "temperature": choose.choice([0.0, 0.8]), "seed": choose.randrange(100),
        "n": choose.choice([1, 1, 1, 2]), "logprobs": choose.choice([None, None, 2]), "priority": choose.randint(0, 1),
    }  # fmt: skip


MALFORMED: list[Callable[[dict[str, Any]], Any]] = [
    lambda body: {**body, "prompt": []},
    lambda body: {**body, "prompt": [-1]},
    lambda body: {**body, "prompt": [VOCAB_SIZE + 5]},
    lambda body: {**body, "prompt": [7] * 2000},
    lambda body: {**body, "prompt": {"no": "text"}},
    lambda body: {**body, "max_tokens": CONTEXT * 2},
    lambda body: {**body, "temperature": "warm"},
    lambda body: {**body, "n": 10**9},
    lambda body: {**body, "logit_bias": {"999999": 1.0}},
    lambda body: {**body, "not_a_field": 1},
    lambda body: {"prompt": body["prompt"]},
    lambda body: [body],
    lambda body: None,
    lambda body: b'{"model": "smollm2", "prompt": [1, 2',
    lambda body: b"\xff\xfe\x00",
    lambda body: b"[" * 10_000,
]


class Clients:
    """Clients of all kinds.

    Args:
        client: they share its connections.
        url: of the server.
    """

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self._url = client, url
        self.counts: Counter[str] = Counter()
        self.num_come_back = 0

    async def one(self, choose: random.Random) -> None:
        """One request: served, left half way, given up on, constrained, or wrong from the start.

        Whoever is told to come back does.
        """
        kind = choose.choice(["served", "streamed", "left", "timed out", "constrained", "malformed"])
        given = body(choose)
        while (status := await self._ask(kind, given, choose)) == 429:
            self.num_come_back += 1
            await asyncio.sleep(choose.uniform(0.3, 1.0))
        if kind == "malformed":
            assert status in (400, 404, 413), f"{status} for a request that can't be"
        else:
            assert status == 200, f"{status} for a good request"
        self.counts[kind] += 1

    async def _ask(self, kind: str, given: dict[str, Any], choose: random.Random) -> int:
        if kind in ("streamed", "left"):
            return await self._stream({**given, "stream": True}, leaves=kind == "left", choose=choose)
        if kind == "constrained":
            messages = [{"role": "system", "content": "Pick."}, {"role": "user", "content": "Hi"}]
            asked = {"model": "smollm2", "messages": messages, "max_tokens": 12, "response_format": CONSTRAINED}
            return await self._post("/v1/chat/completions", asked)
        if kind == "malformed":
            return await self._post("/v1/completions", choose.choice(MALFORMED)(given))
        if kind == "timed out":
            try:
                return await self._post("/v1/completions", given, timeout=choose.uniform(0.005, 0.5))
            except httpx.TimeoutException:
                return 200
        return await self._post("/v1/completions", given)

    async def _stream(self, given: dict[str, Any], leaves: bool, choose: random.Random) -> int:
        async with self._client.stream("POST", f"{self._url}/v1/completions", json=given) as answer:
            line = ""
            async for line in answer.aiter_lines():
                if line == "data: [DONE]" or (leaves and choose.random() < 0.5):
                    break
            assert leaves or answer.status_code != 200 or line == "data: [DONE]", "a stream broke off"
            return answer.status_code

    async def _post(self, path: str, given: Any, timeout: float | None = None) -> int:
        content = given if isinstance(given, bytes) else json.dumps(given).encode()
        headers = {"Content-Type": "application/json"}
        answer = await self._client.post(f"{self._url}{path}", headers=headers, timeout=timeout, content=content)
        return answer.status_code


async def soak(running: Running, num_waves: int, choose: random.Random, trend: MemoryTrend) -> Clients:
    """Waves of clients; after each of them everything must be as it was.

    Returns:
        Who they were.
    """
    places = asyncio.Semaphore(MOST_AT_ONCE)
    async with httpx.AsyncClient(timeout=None) as client:
        clients = Clients(client, running.url)

        async def guarded(choose: random.Random) -> None:
            async with places:
                await clients.one(choose)

        for wave in range(1, num_waves + 1):
            await asyncio.gather(*(guarded(random.Random(choose.random())) for _ in range(WAVE)))
            while running.engine.num_running or running.engine.num_waiting:
                await asyncio.sleep(0.02)
            running.engine.check_idle()
            trend.sample(wave * WAVE)
        assert (await client.get(f"{running.url}/health")).json() == {"status": "ok"}
        return clients


def test_the_real_model_survives_its_clients(
    length: Length, fresh: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine("smollm2", EngineConfig(
        SchedulerConfig(max_running=12, token_budget=64, max_context=CONTEXT, preemption="swap"), num_blocks=16,
        block_size=4, num_host_blocks=8, prefix_cache="radix", weights="stored",
        speculation=SpeculationConfig(NgramDrafter),
    ))  # fmt: skip
    running = start(engine, ServerConfig("smollm2", max_body_bytes=8_000, max_concurrent=MOST_SERVED))
    trend = MemoryTrend()
    clients = asyncio.run(soak(running, length.soak_waves, fresh, trend))
    running.stop()
    engine.check_idle()
    preemptions = engine.metrics.num_preemptions
    print(f"{clients.counts.total()} requests: {dict(clients.counts)}, {preemptions} preemptions, "
          f"{clients.num_come_back} times told to come back")  # fmt: skip
    assert clients.counts.total() == length.soak_waves * WAVE
    assert preemptions > 0
    failures = [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert not failures, caplog.text
    if length.soak_waves > 1:
        assert min(*clients.counts.values(), clients.num_come_back, preemptions) > 20
        print(trend.check())
