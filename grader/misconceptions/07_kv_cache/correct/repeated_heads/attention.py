"""The textbook form: K/V heads copied for each query head, an additive mask, a softmax written out."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int) -> Tensor:
    """Row by row: each query sees the keys up to its own position."""
    if type(num_queries) is not int or type(num_keys) is not int or min(num_queries, num_keys) < 0:
        raise ValueError(
            f"numbers of tokens must be whole and not negative, got {num_queries!r} and {num_keys!r}"
        )
    mask = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for row in range(num_queries):
        mask[row, : max(0, row + 1 + num_keys - num_queries)] = True
    return mask


def cached_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q k^T · scale + mask) v, with k and v repeated."""
    shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes) or shapes[1] != shapes[2]:
        raise ValueError(f"q, k and v of shapes {shapes} don't fit together")
    if len({tensor.dtype for tensor in (q, k, v)}) > 1 or not q.dtype.is_floating_point:
        raise ValueError("q, k and v must have one floating point dtype")
    (batch, heads, num_queries, head_dim), (kv_batch, kv_heads, num_keys, kv_dim) = shapes[:2]
    if batch != kv_batch or head_dim != kv_dim or kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"q of shape {shapes[0]} can't attend to k of shape {shapes[1]}")

    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    q64, k64, v64 = q.to(compute), k.to(compute), v.to(compute)
    k64, v64 = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (k64, v64))
    scores = torch.einsum("bhqd,bhkd->bhqk", q64, k64) * (head_dim**-0.5 if scale is None else scale)
    if num_keys == 0:
        return torch.zeros_like(q)
    visible = causal_mask(num_queries, num_keys)
    scores = scores + torch.zeros(visible.shape, dtype=compute).masked_fill(~visible, float("-inf"))
    highest = scores.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(scores - highest)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(compute).tiny)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v64).to(q.dtype)
