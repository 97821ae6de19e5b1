"""The OpenAI API as types: what clients send, checked and turned into the engine's terms, and what they get back."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from labkit.tokenizer import StreamDecoder, Tokenizer

from ..grammar import Constraint
from ..request import Completion, TokenLogprob
from ..sampling_params import SamplingParams

Stop = str | list[str] | None


class _Body(BaseModel):
    """A body whose unknown fields are refused by name: a setting that does nothing would be worse."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Body):
    """Whether the last chunk of a stream tells the usage."""

    include_usage: bool = False


class JsonSchema(_Body):
    """The schema of a structured answer; others than the schema itself are for the client's own use."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """Plain text, any JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> Constraint | None:
        """In the engine's terms.

        Raises:
            ValueError: a schema is wanted and none given.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint.json_schema({"type": "object"})
        if self.json_schema is None:
            raise ValueError("response_format of type json_schema needs json_schema.schema")
        return Constraint.json_schema(self.json_schema.schema_)


class _Settings(_Body):
    """What chats and completions have in common."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0)
    n: int = Field(1, ge=1)
    stop: Stop = None
    seed: int | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int = 0
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        """The fields that say something: null is as good as not given, and half a character is no text."""
        try:
            json.dumps(body, ensure_ascii=False, default=repr).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            reason = "half of a surrogate pair, \\ud800 to \\udfff; send whole characters"
            if isinstance(error, RecursionError):
                reason = "lists or objects in each other that are too many; send fewer"
            raise ValueError(f"it holds {reason}") from error
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def _params(self, max_tokens: int, logprobs: int | None, seed: int) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true; set it, or leave stream_options out")
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            seed=seed if self.seed is None else self.seed, max_tokens=max_tokens, n=self.n, stop=stop,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty, logit_bias=tuple((self.logit_bias or {}).items()),
            ignore_eos=self.ignore_eos, logprobs=logprobs,
        )  # fmt: skip


class TextPart(_Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """For a chat template; templates call a developer's words the system's."""
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": role, "content": content}


class ChatBody(_Settings):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None

    def params(self, room: int, seed: int) -> SamplingParams:
        """In the engine's terms.

        Args:
            room: tokens that the context has left, the answer's limit if none is given.
            seed: if none is given.

        Raises:
            ValueError: settings that don't go together.
        """
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, and logprobs is not true; set it, or give neither")
        limit = self.max_completion_tokens or self.max_tokens or room
        return self._params(limit, (self.top_logprobs or 0) if self.logprobs else None, seed)


class CompletionBody(_Settings):
    """Body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    suffix: None = None
    best_of: Literal[1] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or more prompts.

        Raises:
            ValueError: none.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ValueError("prompt is empty; give a text, token ids, or a list of either")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self, seed: int) -> SamplingParams:
        """In the engine's terms."""
        return self._params(self.max_tokens, self.logprobs, seed)


def usage_of(completions: list[Completion]) -> dict[str, Any]:
    """Tokens of an answer; a prompt counts once, however many samples it has."""
    prompt = sum(one.num_prompt_tokens for one in completions if one.request_id.endswith(".0"))
    output = sum(len(one.tokens) for one in completions)
    cached = sum(one.num_cached_tokens for one in completions if one.request_id.endswith(".0"))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(reports: tuple[TokenLogprob, ...], tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities as the chat API tells them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token, special=True)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]} for one in reports
        ],
        "refusal": None,
    }


class TextOffsets:
    """Where the tokens of an answer begin in its text; those of one character share its place.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._length = 0

    def take(self, token: int) -> int:
        """The place of the next token, in characters."""
        place = self._length
        self._length += len(self._decoder.feed(token))
        return place


def text_logprobs(reports: tuple[TokenLogprob, ...], offsets: TextOffsets) -> dict[str, Any]:
    """Log-probabilities as the completions API tells them, for the next tokens of an answer."""

    def text(token: int) -> str:
        data = offsets.tokenizer.token_bytes(token, special=True)
        try:
            return data.decode()
        except UnicodeDecodeError:
            # As replacement characters, different tokens would be one.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    return {
        "tokens": [text(one.token) for one in reports],
        "token_logprobs": [one.logprob for one in reports],
        # The token itself is always among them, however unlikely it was.
        "top_logprobs": [
            {text(token): value for token, value in (*one.top, (one.token, one.logprob))} for one in reports
        ],
        "text_offset": [offsets.take(one.token) for one in reports],
    }


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error as clients of the API expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def server_sent(data: dict[str, Any] | str) -> str:
    """One event of a stream."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
