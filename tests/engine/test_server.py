"""The server over real sockets, asked by the official client and by clients that misbehave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from solutions.engine import Engine, EngineConfig
from solutions.engine.scheduler import SchedulerConfig
from solutions.engine.server import ServerConfig
from tests.engine import running_server
from tests.engine.running_server import KEY, Running


def start(model: Any, config: ServerConfig, engine_config: EngineConfig | None = None) -> Running:
    """Serves a model with a small pool, unless told otherwise."""
    small = EngineConfig(SchedulerConfig(max_context=128), num_blocks=64)
    return running_server.start(Engine(model, engine_config or small), config)


@pytest.fixture(scope="module")
def running(tiny_model: Any) -> Iterator[Running]:
    """A server with a key and small limits."""
    config = ServerConfig("tiny", KEY, max_body_bytes=20_000, max_concurrent=4)
    started = start(tiny_model, config)
    yield started
    started.stop()


CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 6}


def test_a_chat_whole_and_streamed_is_the_same(running: Running) -> None:
    client = running.client()
    whole = client.chat.completions.create(**CHAT, temperature=0.9, seed=3)
    assert whole.usage is not None and whole.usage.completion_tokens <= 6
    assert whole.choices[0].finish_reason in ("length", "stop")
    chunks = list(
        client.chat.completions.create(
            **CHAT, temperature=0.9, seed=3, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_of_texts_and_tokens(running: Running) -> None:
    client = running.client()
    answer = client.completions.create(
        model="tiny", prompt=[[7, 400], [31, 5, 6]], max_tokens=4, n=2, seed=1, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens == 5
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 4 and all(
        value <= 0 for value in logprobs.token_logprobs if value is not None
    )
    text = client.completions.create(model="tiny", prompt="Once", max_tokens=3, temperature=0).choices[0].text
    streamed = client.completions.create(model="tiny", prompt="Once", max_tokens=3, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text


def test_ignore_eos_writes_on_past_the_end_of_text(running: Running) -> None:
    only = {str(token): 100.0 for token in running.engine.tokenizer.stop_ids}
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 5, "temperature": 0, "logit_bias": only}
    for ignored, reason, written in ((False, "stop", 0), (True, "length", 5)):
        answer = running.post("/v1/completions", {**body, "ignore_eos": ignored}).json()
        assert answer["choices"][0]["finish_reason"] == reason
        assert answer["usage"]["completion_tokens"] == written


def test_structured_answers_parse(running: Running) -> None:
    class Pet(BaseModel):
        kind: str
        age: int

    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
        "required": ["kind", "age"],
        "additionalProperties": False,
    }
    answer = running.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "A pet."}],
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}},
    )
    assert Pet.model_validate_json(answer.choices[0].message.content or "").kind in ("cat", "dog")


def test_models_health_and_metrics(running: Running) -> None:
    assert [model.id for model in running.client().models.list()] == ["tiny"]
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    running.client().chat.completions.create(**CHAT)
    text = httpx.get(f"{running.url}/metrics").text
    for name in ("engine_ttft_seconds_bucket", "engine_tpot_seconds_bucket", "engine_requests_waiting",
                 "engine_cache_hit_rate", "engine_preemptions_total", "engine_acceptance_rate"):  # fmt: skip
        assert name in text


def test_a_client_that_goes_ends_its_request(running: Running) -> None:
    never = {str(token): -100.0 for token in running.engine.tokenizer.stop_ids}
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 120, "logit_bias": never}
    url, headers = f"{running.url}/v1/completions", {"Authorization": f"Bearer {KEY}"}
    before = running.engine.metrics.num_generated_tokens
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        next(response.iter_lines())
    running.wait_until_idle()
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url, json=body, timeout=0.1, headers=headers)
    running.wait_until_idle()
    assert running.engine.metrics.num_generated_tokens - before < 240, "both were answered to their ends"
    assert running.post("/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({**CHAT, "temperature": 5}, "temperature"),
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "tools": []}, "tools"),
        ({**CHAT, "max_tokens": 500}, "500"),
        ({**CHAT, "messages": [{"role": "user", "content": "word " * 300}]}, "context"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "json_schema"),
        (
            {**CHAT, "response_format": {
                "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}},
            "uniqueItems",
        ),
        ({**CHAT, "stream": True, "max_tokens": 500}, "500"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused_by_field(running: Running, body: dict[str, Any], named: str) -> None:
    response = running.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert named in json.dumps(response.json()["error"])


def test_other_refusals(running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        running.client().chat.completions.create(**{**CHAT, "model": "other"})
    with pytest.raises(openai.AuthenticationError, match="API key"):
        running.client(api_key="wrong").models.list()
    assert running.post("/v1/completions", {"model": "tiny", "prompt": "x" * 30_000}).status_code == 413
    chunked = httpx.post(
        f"{running.url}/v1/completions", content=iter([b"{}"]), headers={"Authorization": f"Bearer {KEY}"}
    )
    assert chunked.status_code == 411
    assert running.post("/v1/chat/completions", CHAT).status_code == 200


def test_too_many_at_once_are_told_to_come_back(running: Running) -> None:
    statuses: list[int] = []
    retry: list[str | None] = []

    def ask() -> None:
        response = running.post("/v1/chat/completions", {**CHAT, "max_tokens": 60})
        statuses.append(response.status_code)
        if response.status_code == 429:
            retry.append(response.headers.get("retry-after"))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429} and set(retry) == {"1"}
    running.wait_until_idle()


def test_a_shutdown_finishes_what_runs(tiny_model: Any) -> None:
    started = start(tiny_model, ServerConfig("tiny", patience=15))
    answers: list[httpx.Response] = []
    body = {**CHAT, "max_tokens": 40}
    asking = threading.Thread(target=lambda: answers.append(started.post("/v1/chat/completions", body)))
    asking.start()
    until = time.monotonic() + 20
    while not started.engine.num_running and time.monotonic() < until:
        time.sleep(0.005)
    started.stop()
    asking.join(20)
    assert (
        answers
        and answers[0].status_code == 200
        and answers[0].json()["choices"][0]["finish_reason"] in ("length", "stop")
    )
    assert not started.engine.has_work
