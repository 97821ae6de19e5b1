"""The server over real sockets, asked by the official client and by clients that misbehave."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from solutions.engine import Engine, EngineConfig
from solutions.engine.scheduler import SchedulerConfig
from solutions.engine.server.openai_answers import TextOffsets
from solutions.engine.server.server_config import ServerConfig
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


def test_a_client_that_goes_ends_its_request(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    never = {str(token): -100.0 for token in running.engine.tokenizer.stop_ids}
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 120, "logit_bias": never}
    url, headers = f"{running.url}/v1/completions", {"Authorization": f"Bearer {KEY}"}
    before = running.engine.metrics.num_generated_tokens
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        next(response.iter_lines())
    running.wait_until_idle()
    assert running.engine.metrics.num_generated_tokens - before < 120, "the stream went on to its end"
    before = running.engine.metrics.num_generated_tokens
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url, json={**body, "n": 4}, timeout=0.1, headers=headers)
    running.wait_until_idle()
    assert running.engine.metrics.num_generated_tokens - before < 480, "the answer was written to its end"
    assert running.post("/v1/chat/completions", CHAT).status_code == 200
    gc.collect()  # what nobody has waited for is logged when it goes
    assert not caplog.records, caplog.text


def test_a_client_that_goes_before_the_first_token_ends_its_stream(tiny_model: Any) -> None:
    in_pieces = EngineConfig(SchedulerConfig(max_context=128, token_budget=16, max_running=16), num_blocks=64)
    started = start(tiny_model, ServerConfig("tiny"), in_pieces)
    go, step = threading.Event(), started.engine.step
    started.engine.step = lambda: step() if go.wait(20) else []  # type: ignore[method-assign]
    with pytest.raises(httpx.TimeoutException):
        body = {"model": "tiny", "prompt": [7] * 120, "max_tokens": 5, "stream": True}
        httpx.post(f"{started.url}/v1/completions", json=body, timeout=0.5)
    time.sleep(0.3)
    go.set()
    started.wait_until_idle()
    assert started.engine.metrics.num_computed_tokens < 100, "its prompt was computed to the end"
    started.stop()


def test_one_refused_prompt_ends_the_others(running: Running) -> None:
    body = {"model": "tiny", "max_tokens": 120, "ignore_eos": True}
    before = running.engine.metrics.num_generated_tokens
    assert running.post("/v1/completions", {**body, "prompt": [[5], [6], [99_999]]}).status_code == 400
    running.wait_until_idle()
    assert running.engine.metrics.num_generated_tokens - before < 240, "nobody waited for them"
    refused = running.post("/v1/completions", {**body, "prompt": ["a"] * 5})
    assert refused.status_code == 400 and "at most 4" in refused.json()["error"]["message"], "no waiting would help"


def test_offsets_point_into_the_text(running: Running) -> None:
    """Tokens of one character share its place, whole or streamed."""
    encode = running.engine.tokenizer.encode
    character, letter = encode("🦄"), encode("a")
    count = len(character)
    assert count > 1 == len(letter)
    offsets = TextOffsets(running.engine.tokenizer)
    places = [offsets.take(token) for token in character * 2 + letter]
    assert places == [0] * count + [1] * count + [2]
    body: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 40, "seed": 1, "logprobs": 3}
    whole = running.client().completions.create(**body).choices[0].logprobs
    assert whole is not None and whole.text_offset and whole.top_logprobs
    streamed = [chunk.choices[0].logprobs for chunk in running.client().completions.create(**body, stream=True)]
    assert [place for one in streamed if one for place in one.text_offset or ()] == whole.text_offset
    assert {len(one) for one in whole.top_logprobs} <= {3, 4}, "parts of characters are told apart by their bytes"
    assert whole.tokens and all(one in top for one, top in zip(whole.tokens, whole.top_logprobs, strict=True))


def test_other_ways_to_say_the_same(running: Running) -> None:
    """Parts of a text are joined, a developer is a system, and of two limits the newer counts."""
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "have."}]
    answers = [
        running.post(
            "/v1/chat/completions", {**CHAT, "messages": [first, *CHAT["messages"]], "seed": 1, **limits}
        ).json()
        for first, limits in (
            ({"role": "system", "content": "Behave."}, {"max_tokens": 3}),
            ({"role": "developer", "content": parts}, {"max_tokens": 9, "max_completion_tokens": 3}),
        )
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    counts = [{**one["usage"], "prompt_tokens_details": None} for one in answers]
    assert counts[0] == counts[1], "the prompts or the limits differ"


def test_null_is_as_good_as_not_given(running: Running) -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "stream_options", "user", "logit_bias")
    assert running.post("/v1/chat/completions", {**CHAT, **dict.fromkeys(names)}).status_code == 200


def test_what_nothing_answers_is_refused_in_the_same_shape(running: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for method, path, status, named in (
        ("GET", "/v1/nothing", 404, "/v1/nothing"), ("GET", "/v1/completions", 405, "POST"),
        ("DELETE", "/health", 405, "GET"),
    ):  # fmt: skip
        response = httpx.request(method, f"{running.url}{path}", headers=headers)
        assert response.status_code == status and named in response.json()["error"]["message"]
    for content, named in (
        (b"{", "no JSON"), (b"", "the body"), (b"[]", "[]"), (b'{"model":"\xff"}', "UTF-8"),
        (b'{"model":"tiny","prompt":"\\ud800"}', "surrogate"), (b"[" * 5000, "JSON"),
    ):  # fmt: skip
        response = httpx.post(f"{running.url}/v1/completions", content=content, headers=headers)
        assert response.status_code == 400 and named in response.json()["error"]["message"], content[:40]
    response = httpx.post(f"{running.url}/v1/completions", content=b"{}", headers={**headers, "Content-Type": "a/b"})
    assert response.status_code == 400 and "application/json" in response.json()["error"]["message"]


def test_a_fault_of_the_server_has_the_same_shape(tiny_model: Any) -> None:
    started = start(tiny_model, ServerConfig("tiny"))
    started.engine.tokenizer.chat = None  # type: ignore[assignment, method-assign]
    try:
        response = started.post("/v1/chat/completions", CHAT)
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    finally:
        del started.engine.tokenizer.chat
        started.stop()


def test_a_body_in_chunks_is_refused_whatever_length_it_claims(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])), timeout=20) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 2\r\n"
        client.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 411")


def test_samples_are_timed_each_by_itself(tiny_model: Any) -> None:
    """Four samples of a prompt are four answers: as one they would seem to take a quarter of the time a token."""
    started = start(tiny_model, ServerConfig("tiny"))
    answer = started.post("/v1/completions", {"model": "tiny", "prompt": "Once", "max_tokens": 9, "n": 4, "seed": 1})
    reasons = [choice["finish_reason"] for choice in answer.json()["choices"]]
    told = {
        sample.name: sample.value
        for family in text_string_to_metric_families(httpx.get(f"{started.url}/metrics").text)
        for sample in family.samples
    }
    assert reasons == ["length"] * 4
    assert told["engine_ttft_seconds_count"] == told["engine_e2e_seconds_count"] == told["engine_finished_total"] == 4
    spent = told["engine_e2e_seconds_sum"] - told["engine_ttft_seconds_sum"]
    assert told["engine_tpot_seconds_sum"] == pytest.approx(spent / 8)
    started.stop()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({**CHAT, "temperature": 5}, "got 5"),
        ({**CHAT, "logit_bias": {"5": 1e300}}, "-100 to 100"),
        ({**CHAT, "repetition_penalty": 1e-300}, "0.01 to 100"),
        ({**CHAT, "top_logprobs": 2}, "logprobs is not true"),
        ({**CHAT, "stream_options": {"include_usage": True}}, "stream to be true"),
        ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
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
    for header in ("Bearer wrong", KEY, ""):
        refused = httpx.get(f"{running.url}/v1/models", headers={"Authorization": header})
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert running.post("/v1/chat/completions", CHAT).status_code == 200


def test_too_many_at_once_are_told_to_come_back(running: Running) -> None:
    statuses: list[int] = []
    retry: list[str | None] = []
    served: list[str] = []

    def ask() -> None:
        response = running.post("/v1/chat/completions", {**CHAT, "max_tokens": 60})
        statuses.append(response.status_code)
        if response.status_code == 429:
            retry.append(response.headers.get("retry-after"))
            served.append(response.json()["error"]["message"].partition(" ")[0])

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429} and set(retry) == {"1"}
    assert set(served) == {"4"}, "as many as are allowed, and no more"
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
