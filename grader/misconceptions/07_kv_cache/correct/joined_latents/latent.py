"""Adds up what the names say, one term at a time."""

from __future__ import annotations

from typing import Any

from labkit.checks import check_count


def latent_bytes_per_token(config: Any, bytes_per_element: int) -> int:
    """Two parts a layer."""
    return latent_cache_bytes(config, 1, bytes_per_element)


def latent_cache_bytes(config: Any, num_tokens: int, bytes_per_element: int) -> int:
    """Parts times layers times tokens."""
    check_count("tokens", num_tokens, 0)
    check_count("bytes", bytes_per_element, 1)
    parts = (config.kv_lora_rank, config.qk_rope_head_dim)
    return sum(part * bytes_per_element for _ in range(config.num_layers) for part in parts) * num_tokens


def decompressed_bytes_per_token(config: Any, bytes_per_element: int) -> int:
    """Three parts a head."""
    check_count("bytes", bytes_per_element, 1)
    head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return int(head * config.num_heads * config.num_layers * bytes_per_element)


def _product(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def latent_attention_flops(config: Any, num_queries: int, num_keys: int, absorbed: bool) -> int:
    """Product by product."""
    check_count("queries", num_queries, 1)
    check_count("keys", num_keys, 1)
    nope, rope, value, rank = (
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
    )
    position = _product(num_queries, rope, num_keys)
    if absorbed:
        score = _product(num_queries, nope, rank) + _product(num_queries, rank, num_keys)
        output = _product(num_queries, num_keys, rank) + _product(num_queries, rank, value)
    else:
        score = _product(num_keys, rank, nope) + _product(num_queries, nope, num_keys)
        output = _product(num_keys, rank, value) + _product(num_queries, num_keys, value)
    return int(config.num_heads * (position + score + output))
