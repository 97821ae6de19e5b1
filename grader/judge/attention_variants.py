"""Reference mathematics of sliding-window and latent attention: a query at a time over just the keys it may see.

No mask exists here, and no axis is broadcast, so that these can't share a mistake with a solution. Results come in the
dtype of the inputs: give float64 for the reference, the judged dtype for the measure of what that dtype costs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None = None) -> Tensor:
    """Causal attention in which a query sees the last `window` keys up to its own.

    Args:
        q: `[batch, heads, num_queries, head_dim]`, the last tokens of the sequence.
        k: `[batch, kv_heads, num_keys, head_dim]`
        v: `[batch, kv_heads, num_keys, value_dim]`
        window: None for no limit.
        scale: factor on the scores; None means 1 / sqrt(head_dim).

    Returns:
        `[batch, heads, num_queries, value_dim]`; 0 where a query sees no key.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    result = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for row in range(q.shape[2]):
        end = k.shape[2] - q.shape[2] + row + 1
        start = 0 if window is None else max(0, end - window)
        for head in range(q.shape[1]) if end > 0 else ():
            shared = head // (q.shape[1] // k.shape[1])
            keys, values = k[:, shared, start:end], v[:, shared, start:end]
            weights = ((keys * q[:, head, row : row + 1]).sum(2) * scale).softmax(1)
            result[:, head, row] = (weights.unsqueeze(2) * values).sum(1)
    return result


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Causal multi-head latent attention, from the definition; shapes as in lab 07, task 12."""
    scale = (q_nope.shape[3] + q_rope.shape[3]) ** -0.5 if scale is None else scale
    result = torch.zeros(*q_nope.shape[:3], w_uv.shape[1], dtype=q_nope.dtype)
    for head in range(q_nope.shape[1]):
        query = torch.cat((q_nope[:, head], q_rope[:, head]), dim=2)
        key = torch.cat(((w_uk[head] * latents.unsqueeze(2)).sum(3), rope_keys), dim=2)
        value = (w_uv[head] * latents.unsqueeze(2)).sum(3)
        result[:, head] = windowed_attention(query[:, None], key[:, None], value[:, None], None, scale)[:, 0]
    return result
