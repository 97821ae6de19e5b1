"""Task 12d: what multi-head latent attention (MLA) stores, and what its two forms compute."""

from __future__ import annotations

from labkit.checks import check_count
from labkit.latent_config import LatentConfig


def latent_bytes_per_token(config: LatentConfig, bytes_per_element: int) -> int:
    """Bytes that one token adds to an MLA cache, over all layers.

    Args:
        config: sizes of the model's attention.
        bytes_per_element: size of one stored number.

    Returns:
        Bytes: a layer keeps one latent, from which the keys and values of all heads are made, and one rotated key part
        that all heads share.

    Raises:
        ValueError: `bytes_per_element` is not an int of at least 1.

    Source: DeepSeek-AI 2024 (2405.04434); module section 1.3.
    """
    check_count("bytes_per_element", bytes_per_element, 1)
    # BEGIN SOLUTION
    return config.num_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * bytes_per_element
    # END SOLUTION


def latent_cache_bytes(config: LatentConfig, num_tokens: int, bytes_per_element: int) -> int:
    """Bytes of an MLA cache of `num_tokens` tokens; arguments and errors as for `kv_cache_bytes` of task 1."""
    check_count("num_tokens", num_tokens, 0)
    check_count("bytes_per_element", bytes_per_element, 1)
    # BEGIN SOLUTION
    return num_tokens * latent_bytes_per_token(config, bytes_per_element)
    # END SOLUTION


def decompressed_bytes_per_token(config: LatentConfig, bytes_per_element: int) -> int:
    """Bytes that one token would add if the keys and values of all heads were stored instead.

    A head's key has both parts, the shared one too: attention over stored keys needs them side by side.

    Args:
        config: sizes of the model's attention.
        bytes_per_element: size of one stored number.

    Returns:
        Bytes, over all layers.

    Raises:
        ValueError: `bytes_per_element` is not an int of at least 1.
    """
    check_count("bytes_per_element", bytes_per_element, 1)
    # BEGIN SOLUTION
    key_and_value = config.qk_head_dim + config.v_head_dim
    return config.num_layers * config.num_heads * key_and_value * bytes_per_element
    # END SOLUTION


def latent_attention_flops(config: LatentConfig, num_queries: int, num_keys: int, absorbed: bool) -> int:
    """Floating point operations of MLA attention in one layer, from queries and latents to the heads' outputs.

    A product of an [a, b] and a [b, c] matrix counts 2abc; softmax, scale and mask are not counted, and no pair of
    query and key is left out for being masked.

    Args:
        config: sizes of the model's attention.
        num_queries: new tokens.
        num_keys: tokens in the cache, the new ones included.
        absorbed: which of the two forms, see `latent_attention`.

    Returns:
        Decompressed: keys and values of every head from the latents of all tokens, then scores and weighted sums in the
        heads' own dimensions. Absorbed: the queries into the latent space, scores and weighted sums there, the results
        back out.

    Raises:
        ValueError: a count is not an int of at least 1.
    """
    check_count("num_queries", num_queries, 1)
    check_count("num_keys", num_keys, 1)
    # BEGIN SOLUTION
    # Each query goes in through W_UK, and its result out through W_UV; or each key and value comes out of its latent.
    projected = num_queries if absorbed else num_keys
    projections = projected * config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    score_dim = config.kv_lora_rank + config.qk_rope_head_dim if absorbed else config.qk_head_dim
    sum_dim = config.kv_lora_rank if absorbed else config.v_head_dim
    return 2 * config.num_heads * (projections + num_queries * num_keys * (score_dim + sum_dim))
    # END SOLUTION
