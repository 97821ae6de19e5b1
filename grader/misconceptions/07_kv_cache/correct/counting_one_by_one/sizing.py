"""Sizes by counting what is stored piece by piece, and the token limit by bisection on whole numbers."""

from __future__ import annotations

from labkit.config import ModelConfig


def _positive(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} = {value!r}: give a whole number, {least} or more")


def kv_bytes_per_token(config: ModelConfig, bytes_per_element: int) -> int:
    """Adds up the vectors of one token: a key and a value for each stored head of each layer."""
    _positive("bytes_per_element", bytes_per_element, 1)
    total = 0
    for _ in range(config.num_layers):
        for _ in range(config.num_kv_heads):
            key = value = config.head_dim * bytes_per_element
            total += key + value
    return total


def kv_cache_bytes(config: ModelConfig, num_tokens: int, bytes_per_element: int) -> int:
    """Bytes of many tokens."""
    _positive("num_tokens", num_tokens, 0)
    return kv_bytes_per_token(config, bytes_per_element) * num_tokens


def tokens_that_fit(config: ModelConfig, budget_bytes: int, bytes_per_element: int) -> int:
    """The largest count whose bytes don't exceed the budget, by bisection."""
    _positive("budget_bytes", budget_bytes, 0)
    fits, too_many = 0, budget_bytes + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if kv_cache_bytes(config, middle, bytes_per_element) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    # With a budget of 0 the loop doesn't run, and the size of an element would go unchecked.
    _positive("bytes_per_element", bytes_per_element, 1)
    return fits
