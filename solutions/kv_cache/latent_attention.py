"""Task 12f: attention over latents, with keys and values made from them, and without."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.latent_config import LatentConfig

from .sliding_window import masked_softmax, sliding_window_mask


def split_kv_projection(weight: Tensor, config: LatentConfig) -> tuple[Tensor, Tensor]:
    """Take the matrix that makes keys and values from latents apart, head by head.

    Args:
        weight: `kv_b_proj.weight` of a checkpoint, `[heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]`: for one
            head after the other the rows of its key, then those of its value.
        config: sizes of the model's attention.

    Returns:
        W_UK `[heads, qk_nope_head_dim, kv_lora_rank]` and W_UV `[heads, v_head_dim, kv_lora_rank]`: a head's key is
        W_UK · latent, its value W_UV · latent.

    Raises:
        ValueError: the shape is another.
    """
    rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    if tuple(weight.shape) != (rows, config.kv_lora_rank):
        raise ValueError(f"weight must have shape {[rows, config.kv_lora_rank]}, got {list(weight.shape)}")
    # BEGIN SOLUTION
    heads = weight.unflatten(0, (config.num_heads, -1))
    return heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
    # END SOLUTION


def decompressed_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Causal MLA attention that makes the keys and values of all tokens and heads from the latents first.

        key of head h, token j     (W_UK[h] · latent[j],  rope_key[j])
        value                       W_UV[h] · latent[j]

    Everything is computed in fp32 (in float64 for float64 inputs).

    Args:
        q_nope: queries of the newest tokens, the part without position `[batch, heads, num_queries, qk_nope_head_dim]`.
        q_rope: the part with position, rotated `[batch, heads, num_queries, qk_rope_head_dim]`.
        latents: of all tokens, new ones last `[batch, num_keys, kv_lora_rank]`.
        rope_keys: of all tokens, rotated `[batch, num_keys, qk_rope_head_dim]`.
        w_uk: as from `split_kv_projection`.
        w_uv: as from `split_kv_projection`.
        scale: factor on the scores; None means 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).

    Returns:
        `[batch, heads, num_queries, v_head_dim]` in the queries' dtype. A query that sees no key gives 0.

    Raises:
        ValueError: shapes don't fit together.

    Source: DeepSeek-AI 2024 (2405.04434), section 2.1.
    """
    _check_shapes(q_nope, q_rope, latents, rope_keys, w_uk, w_uv)
    # BEGIN SOLUTION
    compute = torch.promote_types(q_nope.dtype, torch.float32)
    scale = _default_scale(q_nope, q_rope) if scale is None else scale
    latent = latents.to(compute).unsqueeze(1)
    keys, values = latent @ w_uk.to(compute).transpose(1, 2), latent @ w_uv.to(compute).transpose(1, 2)
    scores = q_nope.to(compute) @ keys.transpose(2, 3) + _position_scores(q_rope, rope_keys, compute)
    weights = masked_softmax(scores * scale, _causal(scores))
    return (weights @ values).to(q_nope.dtype)
    # END SOLUTION


def absorbed_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float | None = None,
) -> Tensor:
    """The same attention on the latents themselves: no key and no value of any head is made.

        score    q · (W_UK · latent)  =  (W_UKᵀ · q) · latent
        output   Σ w (W_UV · latent)  =  W_UV · (Σ w latent)

    The matrices move to the side of the queries, of which a decode step has one. What is left is attention with a
    single shared key, the latent and its rotated part, whose latent is the value, too.

    Arguments, result and errors are those of `decompressed_attention`.
    """
    _check_shapes(q_nope, q_rope, latents, rope_keys, w_uk, w_uv)
    # BEGIN SOLUTION
    compute = torch.promote_types(q_nope.dtype, torch.float32)
    scale = _default_scale(q_nope, q_rope) if scale is None else scale
    latent = latents.to(compute).unsqueeze(1)
    absorbed = q_nope.to(compute) @ w_uk.to(compute)
    scores = absorbed @ latent.transpose(2, 3) + _position_scores(q_rope, rope_keys, compute)
    weights = masked_softmax(scores * scale, _causal(scores))
    return (weights @ latent @ w_uv.to(compute).transpose(1, 2)).to(q_nope.dtype)
    # END SOLUTION


# BEGIN SOLUTION
def _default_scale(q_nope: Tensor, q_rope: Tensor) -> float:
    """A query has both parts, so both count."""
    return 1.0 / math.sqrt(q_nope.shape[3] + q_rope.shape[3])


def _position_scores(q_rope: Tensor, rope_keys: Tensor, compute: torch.dtype) -> Tensor:
    """The part of the scores that knows positions: every head's query against the one shared key."""
    return q_rope.to(compute) @ rope_keys.to(compute).unsqueeze(1).transpose(2, 3)


def _causal(scores: Tensor) -> Tensor:
    """The mask of scores `[..., num_queries, num_keys]`, the queries last."""
    return sliding_window_mask(scores.shape[-2], scores.shape[-1], None)


# END SOLUTION


def _check_shapes(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, rope_keys: Tensor, w_uk: Tensor, w_uv: Tensor
) -> None:
    """Refuse tensors that don't fit together, before anything is computed."""
    ranks = [t.dim() for t in (q_nope, q_rope, latents, rope_keys, w_uk, w_uv)]
    if ranks != [4, 4, 3, 3, 3, 3]:
        raise ValueError(f"q_nope and q_rope have 4 axes and all others 3, got {ranks}")
    batch, heads, queries, nope = q_nope.shape
    keys, rank, rope = latents.shape[1], latents.shape[2], rope_keys.shape[2]
    for name, tensor, wanted in (
        ("q_rope", q_rope, (batch, heads, queries, rope)),
        ("latents", latents, (batch, keys, rank)),
        ("rope_keys", rope_keys, (batch, keys, rope)),
        ("w_uk", w_uk, (heads, nope, rank)),
        ("w_uv", w_uv, (heads, w_uv.shape[1], rank)),
    ):
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} must have shape {list(wanted)} to fit the others, got {list(tensor.shape)}")
