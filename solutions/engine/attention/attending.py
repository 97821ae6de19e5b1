"""The products of attention, by torch: for single queries of many requests, and for several queries of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mask_of(hidden: Tensor) -> Tensor:
    """What attention adds to scores, made once for all layers: −inf for what is hidden, 0 elsewhere."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


def attend_singles(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """One query of each request. The heads of a group are handed over as queries of one head, so that its keys and
    values are read once.

    Args:
        q: `[requests, heads, head_dim]`.
        keys: `[requests, length, kv_heads, head_dim]`.
        values: as `keys`; they may have a width of their own.
        mask: `[requests, 1, 1, length]`, added to scores, or true where something is seen; None if all is.
        scale: factor on scores; by default one over the root of `head_dim`.

    Returns:
        `[requests, heads, value_dim]`
    """
    grouped = q.unflatten(1, (keys.shape[2], -1))
    read = F.scaled_dot_product_attention(grouped, keys.transpose(1, 2), values.transpose(1, 2), mask, scale=scale)
    return read.flatten(1, 2)


def attend_piece(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float | None = None) -> Tensor:
    """Several queries of one request.

    Args:
        q: `[queries, heads, head_dim]`.
        keys: `[length, kv_heads, head_dim]`.
        values: as `keys`; they may have a width of their own.
        visible: `[queries, length]`; None if there is a key for each query, and it sees those up to its own.
        scale: as for `attend_singles`.

    Returns:
        `[queries, heads, value_dim]`
    """
    # With a batch of one, since on a CPU torch has no fast attention without a batch.
    read = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], visible,
        is_causal=visible is None, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return read[0].transpose(0, 1)
