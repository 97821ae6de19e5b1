"""The reference on the real model: what the cache remembers is what the model would compute again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from labkit.checkpoints import Model, load
from labkit.decoder import full_attention
from solutions.kv_cache.cache import KVCache
from solutions.kv_cache.generation import CachedDecoder, generate, greedy
from tests.evidence.conftest import Length

OPENINGS = [
    "The most surprising thing about {} is",
    "Here is a short story about {}. Once",
    "A beginner who asks about {}",
    "Question: why do people care about {}?\nAnswer:",
    "Three facts about {}:\n1.",
    "In the year 1850, {}",
    "def describe():\n    # prints a line about {}\n",
    "Dear friend, yesterday I read about {} and",
    "{}, explained to a child:",
    "The opposite of {} would be",
]
SUBJECTS = ["lighthouses", "the price of bread", "prime numbers", "sleeping cats", "long bridges"]
PROMPTS = [opening.format(subject) for subject in SUBJECTS for opening in OPENINGS]

# Where the float64 model cannot tell its two best tokens apart within the error of float32, either may be taken.
MOST_TIES = 0.001


@pytest.fixture(scope="module")
def model() -> Model:
    """The bundled model in float32."""
    return load("smollm2")


def whole_logits(decoder: object, tokens: list[int]) -> Tensor:
    """Logits `[tokens, vocab_size]` of one pass over the whole sequence, no cache."""
    ids = torch.tensor([tokens])
    return decoder(ids, torch.arange(len(tokens)), full_attention)[0]  # type: ignore[operator]


def test_cached_greedy_equals_uncached_token_for_token(model: Model, length: Length, fresh: random.Random) -> None:
    ties = checked = 0
    largest_error = 0.0
    for text in fresh.sample(PROMPTS, length.prompts):
        prompt = model.tokenizer.encode(text)
        rows: list[Tensor] = []

        def choose(logits: Tensor, step: int, rows: list[Tensor] = rows) -> int:
            rows.append(logits)
            return greedy(logits, step)

        capacity = len(prompt) + length.new_tokens
        cached = CachedDecoder(model.decoder, KVCache(model.config, capacity))
        generated = generate(cached, prompt, length.new_tokens, choose)
        uncached = whole_logits(model.decoder, prompt + generated[:-1])[len(prompt) - 1 :]
        error = float((torch.stack(rows) - uncached).abs().max())
        largest_error = max(largest_error, error)
        for position in (uncached.argmax(-1) != torch.tensor(generated)).nonzero().flatten().tolist():
            sequence = prompt + generated[:position]
            gap = top_two_gap(sequence)
            assert gap < error, (
                f"prompt {text!r}: token {position} is {generated[position]} with the cache, "
                f"{int(uncached[position].argmax())} without; the best two are {gap:.2e} apart, the error {error:.2e}"
            )
            ties += 1
        checked += len(generated)
    print(f"{length.prompts} prompts, {checked} tokens equal, {ties} ties, largest logit error {largest_error:.1e}")
    assert ties <= MOST_TIES * checked


def top_two_gap(tokens: list[int]) -> float:
    """How far apart the two best next tokens are for the model in float64."""
    exact = load("smollm2", dtype=torch.float64)
    best = whole_logits(exact.decoder, tokens)[-1].topk(2).values
    return float(best[0] - best[1])


def test_any_split_of_the_prompt_gives_the_same_logits(model: Model, length: Length, fresh: random.Random) -> None:
    for text in fresh.sample(PROMPTS, length.prompts):
        tokens = model.tokenizer.encode(text)
        cached = CachedDecoder(model.decoder, KVCache(model.config, len(tokens)))
        parts, start = [], 0
        while start < len(tokens):
            end = fresh.randint(start + 1, len(tokens))
            parts.append(cached.append(tokens[start:end]))
            start = end
        whole = whole_logits(model.decoder, tokens)
        error = float((torch.cat(parts) - whole).abs().max())
        # float32 sums in another order: thousands of roundings, far below what one wrong position would do.
        allowed = 1e-4 * float(whole.abs().max())
        sizes = [len(part) for part in parts]
        assert error <= allowed, f"prompt {text!r} split as {sizes}: error {error:.2e}, allowed {allowed:.2e}"
