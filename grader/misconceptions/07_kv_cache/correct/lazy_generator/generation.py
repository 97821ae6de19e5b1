"""Everything in one generator that checks at its first step; the loop counts down and appends before it chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import cached_attention


class CachedDecoder:
    """Positions are counted by the model itself, and a failed pass is noticed by a flag."""

    def __init__(self, decoder: Any, cache: Any, attention: Callable[..., Tensor] = cached_attention) -> None:
        self.decoder = decoder
        self.cache = cache
        self.attention = attention
        self.vocab_size = decoder.config.vocab_size

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self.cache.length

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.cache.capacity

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Runs the new tokens as a batch of one."""
        tokens = list(tokens)
        _require_ids(tokens, self.vocab_size)
        before = self.length
        if len(tokens) > self.capacity - before:
            raise ValueError(f"no room for {len(tokens)} tokens: {before} of {self.capacity} are taken")
        positions = torch.tensor([[before + index for index in range(len(tokens))]])
        complete = False
        try:
            with torch.inference_mode():
                logits = self.decoder(torch.tensor(tokens).unsqueeze(0), positions, self._attend)
            complete = True
        finally:
            if not complete:
                self.cache.truncate(before)
        return logits.squeeze(0).clone()

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        return self.attention(q, *self.cache.append(layer, k, v))

    def truncate(self, length: int) -> None:
        """As the cache."""
        self.cache.truncate(length)


def greedy(logits: Tensor, step: int) -> int:
    """Walks through the logits; a later token must be strictly better."""
    scores = logits.tolist()
    if (
        not isinstance(scores, list)
        or not scores
        or isinstance(scores[0], list)
        or any(s != s for s in scores)
    ):
        raise ValueError("logits must be one row of numbers")
    return max(range(len(scores)), key=scores.__getitem__)


def stream(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Callable[[Tensor, int], int] = greedy,
    stop_tokens: Collection[int] = (),
) -> Iterator[int]:
    """A generator function: nothing happens, not even the checks, until the first token is asked for."""
    pending = list(prompt)
    _require_ids(pending, model.vocab_size)
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"can't generate {max_new_tokens!r} tokens")
    room = model.capacity - model.length
    if len(pending) + max_new_tokens > room + 1:
        raise ValueError(f"{len(pending)} + {max_new_tokens} - 1 tokens have to be remembered, {room} can be")
    step = 0
    while step < max_new_tokens:
        logits = model.append(pending)
        token = int(choose(logits[len(pending) - 1], step))
        yield token
        if any(token == stop for stop in stop_tokens):
            break
        pending = [token]
        step += 1


def generate(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Callable[[Tensor, int], int] = greedy,
    stop_tokens: Collection[int] = (),
) -> list[int]:
    """Collects the stream."""
    collected = []
    for token in stream(model, prompt, max_new_tokens, choose, stop_tokens):
        collected.append(token)
    return collected


def _require_ids(tokens: list[int], vocab_size: int) -> None:
    if not tokens:
        raise ValueError("there must be at least one token")
    if wrong := [token for token in tokens if type(token) is not int or token not in range(vocab_size)]:
        raise ValueError(f"no token ids of a vocabulary of {vocab_size}: {wrong}")
