"""Task 1a: how many bytes a KV cache needs, before any tensor exists."""

from __future__ import annotations

from labkit.config import ModelConfig


def _check_count(name: str, value: int, least: int) -> None:
    """Refuse anything but an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


def kv_bytes_per_token(config: ModelConfig, bytes_per_element: int) -> int:
    """Bytes of keys and values that one token adds to the cache, over all layers.

    Args:
        config: shape of the model; only the heads that are *stored* count.
        bytes_per_element: size of one stored number (2 for bf16 and fp16, 4 for fp32).

    Returns:
        Bytes per token.

    Raises:
        ValueError: `bytes_per_element` is not an int of at least 1.

    Source: module section 1.3.
    """
    _check_count("bytes_per_element", bytes_per_element, 1)
    # BEGIN SOLUTION
    keys_and_values = 2
    elements_per_layer = config.num_kv_heads * config.head_dim
    return keys_and_values * config.num_layers * elements_per_layer * bytes_per_element
    # END SOLUTION


def kv_cache_bytes(config: ModelConfig, num_tokens: int, bytes_per_element: int) -> int:
    """Bytes of keys and values of `num_tokens` cached tokens.

    Args:
        config: shape of the model.
        num_tokens: cached tokens, summed over all sequences; 0 is allowed.
        bytes_per_element: size of one stored number.

    Returns:
        Bytes.

    Raises:
        ValueError: `num_tokens` is negative or no int, or `bytes_per_element` is not an int of at least 1.
    """
    _check_count("num_tokens", num_tokens, 0)
    _check_count("bytes_per_element", bytes_per_element, 1)
    # BEGIN SOLUTION
    return num_tokens * kv_bytes_per_token(config, bytes_per_element)
    # END SOLUTION


def tokens_that_fit(config: ModelConfig, budget_bytes: int, bytes_per_element: int) -> int:
    """The most tokens whose keys and values fit into a memory budget.

    Args:
        config: shape of the model.
        budget_bytes: memory left for the cache, in bytes; 0 is allowed.
        bytes_per_element: size of one stored number.

    Returns:
        A whole number of tokens: part of a token is no token, and a budget that is met exactly is met.

    Raises:
        ValueError: `budget_bytes` is negative or no int, or `bytes_per_element` is not an int of at least 1.
    """
    _check_count("budget_bytes", budget_bytes, 0)
    _check_count("bytes_per_element", bytes_per_element, 1)
    # BEGIN SOLUTION
    # Integer division: budgets of tens of GB pass 2**53 bits soon enough for a float to round.
    return budget_bytes // kv_bytes_per_token(config, bytes_per_element)
    # END SOLUTION
