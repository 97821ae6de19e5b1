"""Bodies into requests of the engine, and what comes of them into answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ..async_engine import AsyncEngine, EngineFailed
from ..engine import Engine, Progress, Prompt
from ..grammar import Constraint
from ..metrics import Served
from ..request import Completion
from ..sampling_params import SamplingParams
from .openai_answers import Answer, TextOffsets, chat_logprobs, error_body, server_sent, text_logprobs, usage_of
from .openai_protocol import ChatBody, CompletionBody
from .prometheus import Latencies
from .refusals import Refused
from .server_config import ServerConfig

T = TypeVar("T")


class Service:
    """What the paths of the API do.

    Args:
        engine: the service's own from now on.
        config: what it allows.
        latencies: that it tells the times of requests.
    """

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
        answer = Answer("chatcmpl", "chat.completion", body.model)
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
        answer = Answer("cmpl", "text_completion", body.model)
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

        async def all_of_them() -> list[list[Completion]]:
            working = [asyncio.ensure_future(one(stream)) for stream in streams]
            try:
                return await asyncio.gather(*working)
            finally:
                # Where one is refused, nobody waits for the others.
                for answering in working:
                    answering.cancel()

        several = await _unless_gone(asyncio.ensure_future(all_of_them()), request)
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
        self, answer: Answer, params: SamplingParams, stream: AsyncIterator[Progress], usage: bool
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

    async def _text_chunks(self, answer: Answer, stream: AsyncIterator[Progress], usage: bool) -> AsyncIterator[str]:
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
