"""Attention without a matrix of scores: keys pass by in blocks, and each query keeps a running maximum and sum."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 5


def causal_mask(num_queries: int, num_keys: int) -> Tensor:
    """A lower triangle, shifted so that it ends in the bottom right corner."""
    for count in (num_queries, num_keys):
        if type(count) is not int or count < 0:
            raise ValueError(f"{count!r} is no number of tokens")
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Head by head, block by block."""
    _check(q, k, v)
    group = q.shape[1] // k.shape[1]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = []
    for head in range(q.shape[1]):
        keys, values = k[:, head // group].to(wide), v[:, head // group].to(wide)
        heads.append(_one_head(q[:, head].to(wide) * factor, keys, values))
    return torch.stack(heads, dim=1).to(q.dtype)


def _one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scaled queries `[batch, queries, head_dim]` over keys and values `[batch, keys, head_dim]`."""
    allowed = causal_mask(q.shape[1], k.shape[1])
    total = torch.zeros_like(q)
    mass = torch.zeros_like(q[..., :1])
    # Finite, so that a block without any visible key gives exp(lowest - lowest) times 0 and never inf - inf.
    highest = torch.full_like(mass, torch.finfo(q.dtype).min)
    for start in range(0, k.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        visible = allowed[:, block]
        scores = torch.einsum("bqd,bkd->bqk", q, k[:, block]).masked_fill(~visible, torch.finfo(q.dtype).min)
        new_highest = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        weights = (scores - new_highest).exp() * visible
        shrink = (highest - new_highest).exp()
        total = total * shrink + weights @ v[:, block]
        mass = mass * shrink + weights.sum(dim=-1, keepdim=True)
        highest = new_highest
    return total / mass.where(mass > 0, 1.0)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape != v.shape:
        raise ValueError(
            f"shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}: need 4 axes, k like v"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: need one floating point dtype")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"queries {list(q.shape)} don't go with keys {list(k.shape)}")
