"""Counts token by token and layer by layer, and attends a query at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.checks import check_count

Windows = Sequence[int | None]


def layer_windows(num_layers: int, window: int, full_every: int = 0) -> list[int | None]:
    """Full layers are put in afterwards."""
    for name, value, least in (("layers", num_layers, 1), ("window", window, 1), ("full_every", full_every, 0)):
        check_count(name, value, least)
    windows: list[int | None] = [window] * num_layers
    if full_every:
        for layer in range(full_every - 1, num_layers, full_every):
            windows[layer] = None
    return windows


def _check(config: Any, windows: Windows, num_tokens: int, size: int) -> int:
    check_count("tokens", num_tokens, 0)
    check_count("bytes", size, 1)
    if len(windows) != config.num_layers:
        raise ValueError(f"{len(windows)} windows for {config.num_layers} layers")
    for window in windows:
        check_count("window", 1 if window is None else window, 1)
    return int(size * config.num_kv_heads * config.head_dim)


def windowed_kv_bytes(config: Any, windows: Windows, num_tokens: int, bytes_per_element: int) -> int:
    """Keys, then values."""
    token = _check(config, windows, num_tokens, bytes_per_element)
    total = 0
    for window in windows:
        kept = num_tokens if window is None or window > num_tokens else window
        total += kept * token + kept * token
    return total


def windowed_kv_bytes_of_next_token(config: Any, windows: Windows, num_tokens: int, bytes_per_element: int) -> int:
    """Layers that have room."""
    token = _check(config, windows, num_tokens, bytes_per_element)
    return 2 * token * sum(1 for window in windows if window is None or num_tokens < window)


def sliding_window_mask(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Two triangles."""
    check_count("queries", num_queries, 0)
    check_count("keys", num_keys, 0)
    check_count("window", 1 if window is None else window, 1)
    reach = num_queries + num_keys if window is None else window
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool)
    return everything.tril(num_keys - num_queries).triu(num_keys - num_queries - reach + 1)


def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None = None
) -> Tensor:
    """Cuts the keys for each query."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{q.shape}, {k.shape} and {v.shape} don't fit together")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads can't share {k.shape[1]}")
    visible = sliding_window_mask(q.shape[2], k.shape[2], window)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (t.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    result = torch.zeros_like(q)
    for row, seen in enumerate(visible):
        if seen.any():
            scores = torch.einsum("bhd,bhkd->bhk", q[:, :, row].to(wide), keys[:, :, seen])
            weights = torch.softmax(scores * (q.shape[3] ** -0.5 if scale is None else scale), dim=-1)
            result[:, :, row] = torch.einsum("bhk,bhkd->bhd", weights, values[:, :, seen]).to(q.dtype)
    return result


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Exponentials of what is seen, divided by their sum; nothing where nothing is seen."""
    seen = torch.where(visible.to(scores.device), scores, torch.tensor(-torch.inf, dtype=scores.dtype))
    top = seen.amax(-1, keepdim=True)
    powers = (seen - torch.where(top.isfinite(), top, torch.zeros_like(top))).exp()
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total > 0, total, torch.ones_like(total))
