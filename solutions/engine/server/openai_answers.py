"""The OpenAI API's answers: choices, log-probabilities, usage, chunks and errors as clients parse them."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from labkit.tokenizer import StreamDecoder, Tokenizer

from ..request import Completion, TokenLogprob


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


class Answer:
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


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """An error as clients of the API expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def server_sent(data: dict[str, Any] | str) -> str:
    """One event of a stream."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
