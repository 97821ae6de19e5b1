"""The OpenAI API's bodies as types: what clients send, checked and turned into the engine's terms."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..grammar import Constraint
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
