"""Task 2: attention of new tokens over cached ones, with grouped query heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int) -> Tensor:
    """Which keys each query may attend to, when the queries are the *last* tokens of the keys' sequence.

    Args:
        num_queries: new tokens.
        num_keys: all tokens, the new ones last.

    Returns:
        bool `[num_queries, num_keys]`, True where query i may attend to key j. The last query sees every key
        and each query before it one key less; with more queries than keys the first ones see none.

    Raises:
        ValueError: a count is negative or no int.
    """
    for name, value in (("num_queries", num_queries), ("num_keys", num_keys)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an int of at least 0, got {value!r}")
    # BEGIN SOLUTION
    queries = torch.arange(num_queries).unsqueeze(1)
    keys = torch.arange(num_keys).unsqueeze(0)
    return keys <= queries + (num_keys - num_queries)
    # END SOLUTION


def cached_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of the newest tokens over all tokens, with grouped query heads.

    Scores, softmax and weighted sum are computed in fp32 (in float64 for float64 inputs), whatever the inputs'
    dtype. Query head h reads key and value head `h // (heads // kv_heads)`.

    Args:
        q: queries of the new tokens `[batch, heads, num_queries, head_dim]`, any strides.
        k: keys of all tokens, new ones last `[batch, kv_heads, num_keys, head_dim]`, any strides.
        v: values, same shape as `k`.
        scale: factor on the scores; None means 1 / sqrt(head_dim).

    Returns:
        `[batch, heads, num_queries, head_dim]` in q's dtype. A query that may attend to no key gives 0.

    Raises:
        ValueError: shapes or dtypes don't fit together, or `heads` is no multiple of `kv_heads`.

    Source: Ainslie et al. 2023 (2305.13245) for grouped query heads.
    """
    _check_attention_inputs(q, k, v)
    # BEGIN SOLUTION
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1], k.shape[2]
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    compute = torch.promote_types(q.dtype, torch.float32)
    # Splitting the heads axis makes the heads of one group share a K/V head by broadcasting, without copies.
    grouped = q.to(compute).reshape(batch, kv_heads, heads // kv_heads, num_queries, head_dim)
    keys = k.to(compute).unsqueeze(2)
    values = v.to(compute).unsqueeze(2)
    scores = grouped @ keys.transpose(-1, -2) * scale
    hidden = ~causal_mask(num_queries, num_keys).to(q.device)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    # A row with no key is the softmax of nothing, NaN; filling again makes its weights, and so its output, 0.
    weights = weights.masked_fill(hidden, 0.0)
    return (weights @ values).reshape(batch, heads, num_queries, head_dim).to(q.dtype)
    # END SOLUTION


def _check_attention_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that don't fit together, before anything is computed."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 axes [batch, heads, tokens, head_dim], got shape {list(tensor.shape)}"
            )
        if tensor.dtype != q.dtype or not tensor.dtype.is_floating_point:
            raise ValueError(
                f"q, k and v must share one floating point dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
            )
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must agree in batch and head_dim, got shapes {list(q.shape)} and {list(k.shape)}"
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of kv heads, got {q.shape[1]} and {k.shape[1]}"
        )
