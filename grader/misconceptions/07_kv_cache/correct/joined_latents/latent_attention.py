"""Absorbed: plain attention with one key for all heads, whose front is the value. Decompressed: a head at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split_kv_projection(weight: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Head by head."""
    both = config.qk_nope_head_dim + config.v_head_dim
    if weight.dim() != 2 or weight.shape != (both * config.num_heads, config.kv_lora_rank):
        raise ValueError(f"{list(weight.shape)} doesn't hold {both} rows for each of {config.num_heads} heads")
    heads = [weight[both * head : both * (head + 1)] for head in range(config.num_heads)]
    nope = config.qk_nope_head_dim
    return torch.stack([head[:nope] for head in heads]), torch.stack([head[nope:] for head in heads])


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`[batch, queries, d]` on `[batch, keys, d]`, a row at a time."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
    for row in range(q.shape[1]):
        end = k.shape[1] - q.shape[1] + row + 1
        if end > 0:
            weights = (torch.einsum("bd,bkd->bk", q[:, row], k[:, :end]) * scale).softmax(1)
            out[:, row] = torch.einsum("bk,bkd->bd", weights, v[:, :end])
    return out


def _prepared(*tensors: Tensor) -> list[Tensor]:
    q_nope, q_rope, latents, rope_keys, w_uk, w_uv = tensors
    fits = (
        [t.dim() for t in tensors] == [4, 4, 3, 3, 3, 3]
        and q_nope.shape[:3] == q_rope.shape[:3]
        and q_nope.shape[0] == latents.shape[0] == rope_keys.shape[0]
        and q_nope.shape[1] == w_uk.shape[0] == w_uv.shape[0]
        and q_nope.shape[3] == w_uk.shape[1]
        and q_rope.shape[3] == rope_keys.shape[2]
        and latents.shape[2] == w_uk.shape[2] == w_uv.shape[2]
        and latents.shape[1] == rope_keys.shape[1]
    )
    if not fits:
        raise ValueError(f"shapes don't fit together: {[list(t.shape) for t in tensors]}")
    return [t.double() if t.dtype == torch.float64 else t.float() for t in tensors]


def decompressed_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Keys and values of one head, then of the next."""
    a, b, c, d, up_keys, up_values = _prepared(q_nope, q_rope, latents, rope_keys, w_uk, w_uv)
    factor = (a.shape[3] + b.shape[3]) ** -0.5 if scale is None else scale
    heads = []
    for head in range(a.shape[1]):
        keys = torch.cat((torch.einsum("bkr,nr->bkn", c, up_keys[head]), d), 2)
        values = torch.einsum("bkr,vr->bkv", c, up_values[head])
        heads.append(_attend(torch.cat((a[:, head], b[:, head]), 2), keys, values, factor))
    return torch.stack(heads, 1).to(q_nope.dtype)


def absorbed_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float | None = None,
) -> Tensor:
    """One joined key."""
    a, b, c, d, up_keys, up_values = _prepared(q_nope, q_rope, latents, rope_keys, w_uk, w_uv)
    factor = (a.shape[3] + b.shape[3]) ** -0.5 if scale is None else scale
    queries = torch.cat((torch.einsum("bhqn,hnr->bhqr", a, up_keys), b), 3)
    joined = torch.cat((c, d), 2)
    sums = torch.stack([_attend(queries[:, head], joined, c, factor) for head in range(a.shape[1])], 1)
    return torch.einsum("bhqr,hvr->bhqv", sums, up_values).to(q_nope.dtype)
