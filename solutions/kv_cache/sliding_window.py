"""Task 12a: layers that attend to the newest tokens only: what they store, and what they see."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.config import ModelConfig

Windows = Sequence[int | None]
"""For each layer the tokens that a query sees, its own included; None sees all."""


def layer_windows(num_layers: int, window: int, full_every: int = 0) -> list[int | None]:
    """The windows of a model's layers, where some may attend to everything.

    Args:
        num_layers: decoder layers.
        window: tokens that a query of a windowed layer sees, its own included.
        full_every: the last of so many layers sees everything: layers `full_every - 1`, `2 * full_every - 1`, ….
            0: none does.

    Returns:
        For each layer its window, or None.

    Raises:
        ValueError: `num_layers` or `window` is no int of at least 1, or `full_every` none of at least 0.
    """
    check_count("num_layers", num_layers, 1)
    check_count("window", window, 1)
    check_count("full_every", full_every, 0)
    # BEGIN SOLUTION
    return [None if full_every and (layer + 1) % full_every == 0 else window for layer in range(num_layers)]
    # END SOLUTION


def windowed_kv_bytes(config: ModelConfig, windows: Windows, num_tokens: int, bytes_per_element: int) -> int:
    """Bytes of keys and values that one sequence needs, where a layer keeps no more tokens than its window.

    Args:
        config: shape of the model.
        windows: one for each layer.
        num_tokens: length of the sequence; 0 is allowed.
        bytes_per_element: size of one stored number.

    Returns:
        Bytes.

    Raises:
        ValueError: not one window for each layer, or a number that is no int or too small.

    Source: module section 1.3.
    """
    _check_windows(config, windows)
    check_count("num_tokens", num_tokens, 0)
    check_count("bytes_per_element", bytes_per_element, 1)
    # BEGIN SOLUTION
    kept = sum(num_tokens if window is None else min(num_tokens, window) for window in windows)
    return kept * 2 * config.num_kv_heads * config.head_dim * bytes_per_element
    # END SOLUTION


def windowed_kv_bytes_of_next_token(
    config: ModelConfig, windows: Windows, num_tokens: int, bytes_per_element: int
) -> int:
    """Bytes by which the cache grows when one token is added to a sequence.

    Args:
        config: shape of the model.
        windows: one for each layer.
        num_tokens: length of the sequence before; 0 is allowed.
        bytes_per_element: size of one stored number.

    Returns:
        Bytes. In a layer whose window is full a new token takes the place of the oldest.

    Raises:
        ValueError: as for `windowed_kv_bytes`.
    """
    _check_windows(config, windows)
    check_count("num_tokens", num_tokens, 0)
    check_count("bytes_per_element", bytes_per_element, 1)
    # BEGIN SOLUTION
    after, before = (windowed_kv_bytes(config, windows, n, bytes_per_element) for n in (num_tokens + 1, num_tokens))
    return after - before
    # END SOLUTION


def sliding_window_mask(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Which keys each query may attend to, when the queries are the *last* tokens of the keys' sequence.

    Args:
        num_queries: new tokens.
        num_keys: tokens whose keys are there, the new ones last.
        window: keys that a query sees, its own included; None sees all before it.

    Returns:
        bool `[num_queries, num_keys]`, True where query i may attend to key j: with p the place of query i among the
        keys, where p - window < j <= p. With more queries than keys the first queries see none.

    Raises:
        ValueError: a count is negative or no int, or `window` is neither None nor an int of at least 1.

    Source: Beltagy et al. 2020 (2004.05150); Jiang et al. 2023 (2310.06825).
    """
    check_count("num_queries", num_queries, 0)
    check_count("num_keys", num_keys, 0)
    if window is not None:
        check_count("window", window, 1)
    # BEGIN SOLUTION
    query = torch.arange(num_queries).unsqueeze(1) + (num_keys - num_queries)
    key = torch.arange(num_keys)
    causal = key <= query
    return causal if window is None else causal & (key > query - window)
    # END SOLUTION


def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None = None
) -> Tensor:
    """Attention of the newest tokens over the tokens in their window, with grouped query heads.

    As in task 2, scores, softmax and weighted sum are computed in fp32 (in float64 for float64 inputs).

    Args:
        q: queries of the new tokens `[batch, heads, num_queries, head_dim]`.
        k: keys `[batch, kv_heads, num_keys, head_dim]`, those of the new tokens last. What no query sees may be left
            out in front.
        v: values, same shape as `k`.
        window: as in `sliding_window_mask`.
        scale: factor on the scores; None means 1 / sqrt(head_dim).

    Returns:
        `[batch, heads, num_queries, head_dim]` in q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: shapes don't fit together, or `window` is neither None nor an int of at least 1.
    """
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[::3] == k.shape[::3]
    if not fits or k.shape[1] < 1 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"q [batch, heads, new, head_dim], k and v [batch, kv_heads, tokens, head_dim] don't fit together: "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    # BEGIN SOLUTION
    visible = sliding_window_mask(q.shape[2], k.shape[2], window)
    compute = torch.promote_types(q.dtype, torch.float32)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    # One axis for the kv heads and one for the query heads of a group, which share a key by broadcasting.
    grouped = q.to(compute).unflatten(1, (k.shape[1], -1))
    keys, values = k.to(compute).unsqueeze(2), v.to(compute).unsqueeze(2)
    weights = masked_softmax(grouped @ keys.transpose(-1, -2) * scale, visible)
    return (weights @ values).flatten(1, 2).to(q.dtype)
    # END SOLUTION


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the keys that a query sees; all 0 where it sees none.

    Args:
        scores: `[..., num_queries, num_keys]`.
        visible: bool `[num_queries, num_keys]`.
    """
    hidden = ~visible.to(scores.device)
    return scores.masked_fill(hidden, -math.inf).softmax(dim=-1).masked_fill(hidden, 0.0)


def _check_windows(config: ModelConfig, windows: Windows) -> None:
    """Refuse anything but one window, or None, for each layer."""
    if len(windows) != config.num_layers:
        raise ValueError(f"windows must name one for each of the {config.num_layers} layers, got {len(windows)}")
    for layer, window in enumerate(windows):
        if window is not None:
            check_count(f"windows[{layer}]", window, 1)
