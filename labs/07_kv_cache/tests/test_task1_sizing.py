"""Task 1a: bytes of keys and values, by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from grader.judge.refusal import check_refused
from labkit.config import ModelConfig

pytestmark = pytest.mark.task(1)

KIB, GIB = 1024, 1024**3

# layers, query heads, kv heads, head dim; KiB a token and GiB for 32,768 tokens in a 2-byte dtype
MODELS = {
    "Qwen2.5-0.5B": (24, 14, 2, 64, 12, 0.375),
    "Qwen2.5-1.5B": (28, 12, 2, 128, 28, 0.875),
    "Llama-3-8B": (32, 32, 8, 128, 128, 4.0),
    "Llama-3-70B": (80, 64, 8, 128, 320, 10.0),
}


def config(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """A model of that shape; the sizes that don't matter for the cache differ from all that do."""
    return ModelConfig.tiny(num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def check_count(what: str, got: object, right: int, advice: str) -> None:
    """A whole number of bytes or tokens, as an int."""
    assert type(got) is int, f"{what} must be an int, got {got!r} of type {type(got).__name__}"
    assert got == right, f"{what} is {right}, got {got}. {advice}"


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token_of_the_four_models(lab: Any, name: str) -> None:
    *shape, kib, _ = MODELS[name]
    got = lab.kv_bytes_per_token(config(*shape), 2)
    check_count(f"{name}, bytes per token in bf16", got, kib * KIB, "Multiply out what attention needs of one token.")


@pytest.mark.parametrize("name", MODELS)
def test_context_bytes_of_the_four_models(lab: Any, name: str) -> None:
    *shape, _, gib = MODELS[name]
    got = lab.kv_cache_bytes(config(*shape), 32_768, 2)
    check_count(f"{name}, bytes of a 32k context in bf16", got, int(gib * GIB), "32k tokens are 32,768.")


def test_each_factor_counts_once(lab: Any) -> None:
    base = (3, 10, 5, 14)
    for shape in (base, (6, 10, 5, 14), (3, 20, 5, 14), (3, 10, 10, 14), (3, 10, 5, 28), (1, 2, 2, 2)):
        for size in (1, 2, 4):
            layers, _, kv_heads, head_dim = shape
            per_token = sum(size for _ in ("k", "v") for _ in range(layers * kv_heads * head_dim))
            what = f"(layers, heads, kv_heads, head_dim) = {shape}, {size} bytes an element: bytes"
            advice = "Each of K and V, layer, kv head, channel and byte counts; query heads and hidden size do not."
            check_count(f"{what} per token", lab.kv_bytes_per_token(config(*shape), size), per_token, advice)
            for tokens in (0, 1, 7):
                got = lab.kv_cache_bytes(config(*shape), tokens, size)
                check_count(f"{what} of {tokens} tokens", got, tokens * per_token, advice)


def test_tokens_that_fit_is_exact_at_the_boundary(lab: Any) -> None:
    shape = config(*MODELS["Qwen2.5-0.5B"][:4])
    per_token = 12 * KIB
    for tokens in (1, 2, 5, 100_000, 2**52 + 1):
        for budget, right in (
            (tokens * per_token - 1, tokens - 1),
            (tokens * per_token, tokens),
            (tokens * per_token + per_token - 1, tokens),
        ):
            got = lab.tokens_that_fit(shape, budget, 2)
            advice = "A budget met exactly is met, part of a token is no token, and floats round large budgets."
            check_count(f"tokens of {per_token} bytes in {budget} bytes", got, right, advice)
    check_count("tokens in 0 bytes", lab.tokens_that_fit(shape, 0, 2), 0, "Nothing fits into nothing.")
    got = lab.tokens_that_fit(shape, 5 * per_token, 4)
    check_count("fp32 tokens in room for 5 bf16 ones", got, 2, "The size of an element counts.")


def test_impossible_sizes_are_refused(lab: Any) -> None:
    shape = config(3, 10, 5, 14)
    good = "a good call comes first"
    check_count("bytes per token", lab.kv_bytes_per_token(shape, 2), 840, good)
    check_count("bytes of 10 tokens", lab.kv_cache_bytes(shape, 10, 2), 8400, good)
    check_count("tokens in 8400 bytes", lab.tokens_that_fit(shape, 8400, 2), 10, good)
    check_refused("0 bytes per element", lambda: lab.kv_bytes_per_token(shape, 0))
    check_refused("half a byte per element", lambda: lab.kv_bytes_per_token(shape, 0.5))
    check_refused("-1 tokens", lambda: lab.kv_cache_bytes(shape, -1, 2))
    check_refused("a negative budget", lambda: lab.tokens_that_fit(shape, -1, 2))
    check_refused("0 bytes per element", lambda: lab.tokens_that_fit(shape, 8400, 0))
