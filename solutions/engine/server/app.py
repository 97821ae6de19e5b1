"""An OpenAI-compatible server: chats, completions and models over HTTP, streamed or whole."""

from __future__ import annotations

import asyncio
import hmac
import reprlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from ..async_engine import AsyncEngine, EngineFailed
from ..engine import Engine, Progress, Prompt
from ..grammar import Constraint
from ..metrics import Served
from ..request import Completion
from ..sampling_params import SamplingParams
from .openai_protocol import (
    ChatBody,
    CompletionBody,
    TextOffsets,
    chat_logprobs,
    error_body,
    server_sent,
    text_logprobs,
    usage_of,
)
from .prometheus import EngineCollector, Latencies

T = TypeVar("T")


@dataclass(frozen=True)
class ServerConfig:
    """What the server allows.

    Args:
        model_name: as clients call the model.
        api_key: what they must show; None for nothing.
        max_body_bytes: of a request.
        max_concurrent: requests at once; more are answered with 429.
        patience: seconds that a shutdown gives to what is being served.
    """

    model_name: str = "smollm2"
    api_key: str | None = None
    max_body_bytes: int = 1_000_000
    max_concurrent: int = 256
    patience: float = 10.0


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: what was given, what is allowed, what to do.
        kind: the API's word for it.
        param: the field.
    """

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param


def make_app(engine: Engine, config: ServerConfig | None = None) -> FastAPI:
    """The server's application.

    Args:
        engine: the server's own from now on.
        config: what it allows.
    """
    config = config or ServerConfig()
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    service = _Service(engine, config, Latencies(registry))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.serving.shut_down(config.patience)

    app = FastAPI(title="Inference workbook", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.serving = service.serving
    app.middleware("http")(_guard(config))
    app.exception_handler(Refused)(_refused)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_no_such_thing)
    app.exception_handler(Exception)(_failed)

    @app.get("/health")
    async def health() -> Response:
        failure = service.serving.error
        if failure is not None:
            return JSONResponse({"status": "failed", "reason": str(failure)}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": service.model_cards()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.adapter_of(name)
        return next(card for card in service.model_cards() if card["id"] == name)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await service.complete(body, request)

    return app


def run(app: FastAPI, listener: socket.socket, patience: float) -> None:
    """Serves until a signal ends it.

    Args:
        app: of `make_app`.
        listener: a bound socket.
        patience: seconds from the signal on in which answers may end by themselves.
    """
    # The second is for those that were told of the end to read it.
    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(patience) + 2)
    _Server(settings, app.state.serving, patience).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's ends the application when all connections are closed: too late to end what they wait for."""

    def __init__(self, config: uvicorn.Config, serving: AsyncEngine, patience: float) -> None:
        super().__init__(config)
        self._serving, self._patience = serving, patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections as their answers end, which is at once when patience does, or a second Ctrl-C comes."""
        ending = asyncio.ensure_future(self._serving.shut_down(self._patience))
        await super().shutdown(sockets)
        if self.force_exit:
            ending.cancel()
            await self._serving.shut_down(0.0)
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0)), *self.server_state.tasks], timeout=1.0)
            await self.lifespan.shutdown()
        else:
            await ending


class _Service:
    """Turns bodies into requests of the engine, and what comes of them into answers."""

    def __init__(self, engine: Engine, config: ServerConfig, latencies: Latencies) -> None:
        self.serving = AsyncEngine(engine)
        self._tokenizer = engine.tokenizer
        self._adapters = tuple(engine.config.adapters)
        self._max_context = engine.config.scheduler.max_context
        self._config = config
        self._latencies = latencies
        self._started = int(time.time())
        self._busy = 0

    def model_cards(self) -> list[dict[str, Any]]:
        """The model that is served, and its adapters, each a model of its own to clients."""
        base = self._config.model_name
        common = {"object": "model", "created": self._started, "owned_by": "workbook"}
        sizes = {"max_model_len": self._max_context}
        adapters = [{"id": f"{base}:{name}", **common, "parent": base, **sizes} for name in self._adapters]
        return [{"id": base, **common, **sizes}, *adapters]

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a model's name asks for; refuses the name of another model."""
        names = {self._config.model_name: None} | {f"{self._config.model_name}:{name}": name for name in self._adapters}
        if model not in names:
            known = ", ".join(map(repr, names))
            raise Refused(404, f"there is no model {model!r}; this server has {known}", param="model")
        return names[model]

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answers a chat."""
        adapter = self.adapter_of(body.model)
        try:
            prompt = self._tokenizer.chat([message.plain() for message in body.messages])
            room = self._max_context - len(prompt)
            if room < 1:
                raise ValueError(f"the messages have {len(prompt)} tokens, and the context holds {self._max_context}")
            params = body.params(room, secrets.randbits(31))
            constraint = body.response_format.constraint() if body.response_format is not None else None
        except ValueError as error:
            raise Refused(400, str(error)) from error
        answer = _Answer("chatcmpl", "chat.completion", body.model)
        streams = [self._stream(prompt, params, body.priority, body.cache_salt, constraint, adapter)]
        if body.stream:
            chunks = self._chat_chunks(answer, params, streams[0], _wants_usage(body))
            return await self._send(chunks, request)
        completions = await self._collect(streams, request)
        choices = [self._chat_choice(one) for one in completions]
        return JSONResponse(answer.whole(choices, usage_of(completions)))

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Continues one or more texts."""
        adapter = self.adapter_of(body.model)
        try:
            prompts = body.prompts()
            params = body.params(secrets.randbits(31))
        except ValueError as error:
            raise Refused(400, str(error)) from error
        most = self._config.max_concurrent
        if len(prompts) > most:
            raise Refused(400, f"{len(prompts)} prompts were given, and at most {most} are served at once; send fewer",
                          param="prompt")  # fmt: skip
        answer = _Answer("cmpl", "text_completion", body.model)
        streams = [self._stream(prompt, params, body.priority, body.cache_salt, None, adapter) for prompt in prompts]
        if body.stream:
            if len(streams) > 1:
                raise Refused(400, "a stream takes one prompt; send the others by themselves", param="prompt")
            return await self._send(self._text_chunks(answer, streams[0], _wants_usage(body)), request)
        completions = await self._collect(streams, request)
        choices = [
            {
                "index": index,
                "text": one.text,
                "finish_reason": one.finish_reason,
                "logprobs": None if one.logprobs is None else text_logprobs(one.logprobs, TextOffsets(self._tokenizer)),
            }
            for index, one in enumerate(completions)
        ]
        return JSONResponse(answer.whole(choices, usage_of(completions)))

    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        salt: str | None,
        constraint: Constraint | None,
        adapter: str | None,
    ) -> AsyncIterator[Progress]:
        """What the engine brings, its refusals as answers, and its times in the histograms."""
        if self._busy >= self._config.max_concurrent:
            raise Refused(429, f"{self._busy} requests are being served; try again soon", "rate_limit_error")
        self._busy += 1
        started, first, tokens = time.monotonic(), dict[int, float](), Counter[int]()
        try:
            source = self.serving.stream(
                prompt, params, priority=priority, salt=salt, constraint=constraint, adapter=adapter
            )
            async for progress in source:
                index, now = progress.index, time.monotonic()
                first.setdefault(index, now)
                tokens[index] += len(progress.tokens)
                if progress.completion is not None:
                    self._latencies.observe(Served(first[index] - started, now - started, tokens[index]))
                yield progress
        except ValueError as error:
            raise Refused(400, str(error)) from error
        except EngineFailed as error:
            raise Refused(503, str(error), "server_error") from error
        finally:
            self._busy -= 1

    async def _collect(self, streams: list[AsyncIterator[Progress]], request: Request) -> list[Completion]:
        """All answers, by prompt and sample; a client that has gone ends them."""

        async def one(stream: AsyncIterator[Progress]) -> list[Completion]:
            done = [item.completion async for item in stream if item.completion is not None]
            return sorted(done, key=lambda completion: completion.index)

        working = [asyncio.ensure_future(one(stream)) for stream in streams]
        try:
            several = await _unless_gone(asyncio.gather(*working), request)
        finally:
            # Where one is refused, nobody waits for the others.
            for answering in working:
                answering.cancel()
        return [completion for completions in several for completion in completions]

    async def _send(self, chunks: AsyncIterator[str], request: Request) -> Response:
        """A streamed response; a refusal before the first chunk is an error like any other."""
        first = await _unless_gone(asyncio.ensure_future(_first_of(chunks)), request)

        async def body() -> AsyncIterator[str]:
            try:
                yield first
                async for chunk in chunks:
                    yield chunk
            except Refused as refusal:
                yield server_sent(error_body(refusal.message, refusal.kind, refusal.param))
            finally:
                await chunks.aclose()  # type: ignore[attr-defined]

        return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _chat_chunks(
        self, answer: _Answer, params: SamplingParams, stream: AsyncIterator[Progress], usage: bool
    ) -> AsyncIterator[str]:
        completions: list[Completion] = []
        greeted = False
        async for item in stream:
            if not greeted:
                greeted = True
                for index in range(params.n):
                    yield answer.chunk({"index": index, "delta": {"role": "assistant", "content": ""}}, usage)
            if item.text or item.logprobs:
                choice = {"index": item.index, "delta": {"content": item.text}}
                if item.logprobs:
                    choice["logprobs"] = chat_logprobs(item.logprobs, self._tokenizer)
                yield answer.chunk(choice, usage)
            if item.completion is not None:
                completions.append(item.completion)
                yield answer.chunk(
                    {"index": item.index, "delta": {}, "finish_reason": item.completion.finish_reason}, usage
                )
        for piece in answer.end(completions, usage):
            yield piece

    async def _text_chunks(self, answer: _Answer, stream: AsyncIterator[Progress], usage: bool) -> AsyncIterator[str]:
        completions: list[Completion] = []
        offsets: dict[int, TextOffsets] = {}
        async for item in stream:
            choice: dict[str, Any] = {"index": item.index, "text": item.text}
            if item.logprobs:
                own = offsets.setdefault(item.index, TextOffsets(self._tokenizer))
                choice["logprobs"] = text_logprobs(item.logprobs, own)
            if item.completion is not None:
                completions.append(item.completion)
                choice["finish_reason"] = item.completion.finish_reason
            yield answer.chunk(choice, usage)
        for piece in answer.end(completions, usage):
            yield piece

    def _chat_choice(self, one: Completion) -> dict[str, Any]:
        return {
            "index": one.index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "finish_reason": one.finish_reason,
            "logprobs": None if one.logprobs is None else chat_logprobs(one.logprobs, self._tokenizer),
        }


class _Answer:
    """The frame of an answer: name, time and model, the same in every chunk."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self._kind = kind
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """All at once."""
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    def chunk(self, choice: dict[str, Any], usage: bool) -> str:
        """One piece; where usage is asked for, each piece but the last says that it has none."""
        choice = {"finish_reason": None, "logprobs": None, **choice}
        return server_sent({**self._chunk_head(), "choices": [choice], **({"usage": None} if usage else {})})

    def end(self, completions: list[Completion], usage: bool) -> list[str]:
        """The last events of a stream."""
        last = {**self._chunk_head(), "choices": [], "usage": usage_of(completions)}
        return [*([server_sent(last)] if usage else []), server_sent("[DONE]")]

    def _chunk_head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._kind == "chat.completion" else self._kind
        return {**self._head, "object": kind}


def _wants_usage(body: ChatBody | CompletionBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _first_of(chunks: AsyncIterator[str]) -> str:
    return await anext(chunks)


async def _unless_gone(working: asyncio.Future[T], request: Request) -> T:
    """What comes of some work; a client that has gone ends it."""
    watching = asyncio.ensure_future(_gone(request))
    both: set[asyncio.Future[Any]] = {working, watching}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(499, "the client has gone")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _gone(request: Request) -> None:
    """Returns when the client has disconnected."""
    # `Request.is_disconnected` never finds out behind a middleware.
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _guard(config: ServerConfig) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    """Looks at key and size before anything else does."""

    async def guard(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        if config.api_key is not None and request.url.path.startswith("/v1/"):
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # A header's text is its bytes, whatever a client meant by them.
            is_right = hmac.compare_digest(given.encode("latin-1"), config.api_key.encode())
            if scheme.lower() != "bearer" or not is_right:
                text = "wrong or missing API key; send it as 'Authorization: Bearer …'"
                return _error(401, text, "authentication_error", headers={"WWW-Authenticate": "Bearer"})
        if request.method == "POST":
            # A body in chunks is as long as its client likes, whatever a length beside them says.
            if "transfer-encoding" in request.headers or not request.headers.get("content-length", "").isdecimal():
                return _error(411, "the body's length is not told before it; send Content-Length, and no chunks")
            size = int(request.headers["content-length"])
            if size > config.max_body_bytes:
                return _error(413, f"the body has {size} bytes, {config.max_body_bytes} are allowed; send less")
        return await proceed(request)

    return guard


def _error(
    status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:  # fmt: skip
    return JSONResponse(error_body(message, kind, param), status_code=status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return _error(error.status, error.message, error.kind, error.param, headers)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Of what a field might have been, that which it came nearest to.
    nearest = max(error.errors(), key=lambda one: len(one["loc"]))
    kind, told = nearest["type"], nearest["msg"].removeprefix("Value error, ")
    places = [str(part) for part in nearest["loc"][1:]]
    if kind == "json_invalid":
        return _error(400, f"the body is no JSON: {nearest['ctx']['error']}, at character {places[0]}")
    if kind == "extra_forbidden":
        param = ".".join(places)
        return _error(400, f"{param}: this server has no such field; leave it out", param=param)
    if isinstance(nearest.get("input"), bytes):
        return _error(400, "the body is not told to be JSON; send Content-Type: application/json")
    # pydantic names the types that it has tried, too.
    param = ".".join(part for part in places if part != "str" and "[" not in part)
    if kind not in ("missing", "value_error"):
        told += f", got {reprlib.repr(nearest['input'])}"
    return _error(400, f"{param or 'the body'}: {told}", param=param or None)


async def _no_such_thing(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: a path, a method, a body that can't be read."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.scope['path']}"
    told = {
        400: "the body can't be read; send a JSON object in UTF-8",
        404: f"there is no {asked}; there are /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics",
        405: f"there is no {asked}; allowed is {(error.headers or {}).get('Allow', 'another method')}",
    }.get(error.status_code, str(error.detail))
    return _error(error.status_code, told, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, f"the server has failed: {type(error).__name__}; its log says more", "server_error")
