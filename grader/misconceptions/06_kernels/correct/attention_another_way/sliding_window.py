"""Goes through all key tiles and asks each whether a query of the tile sees it."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_attention, check_tile, score_scale
from labkit.checks import check_count
from labkit.launch import backend, launch


@triton.jit
def sliding_window_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    q_stride_d,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    k_stride_d,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    v_stride_d,
    scale,
    num_queries,
    num_keys,
    group_size,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of BLOCK_Q queries of one head: program (tile, head, batch row). out and lse are contiguous."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    kv_head = head // group_size
    row_there = rows < num_queries
    channels = dims < HEAD_DIM
    q_offsets = batch * q_stride_b + head * q_stride_h + rows[:, None] * q_stride_t + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=row_there[:, None] & channels[None, :], other=0.0)
    first_position = tile * BLOCK_Q + num_keys - num_queries
    last_position = tl.minimum((tile + 1) * BLOCK_Q, num_queries) - 1 + num_keys - num_queries
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, num_keys, BLOCK_K):
        if (start <= last_position) & (start + BLOCK_K > first_position - window + 1):
            cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
            mask = (cols < num_keys)[:, None] & channels[None, :]
            k_offsets = (
                batch * k_stride_b + kv_head * k_stride_h + cols[:, None] * k_stride_t + dims[None, :] * k_stride_d
            )
            v_offsets = (
                batch * v_stride_b + kv_head * v_stride_h + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d
            )
            k = tl.load(k_ptr + k_offsets, mask=mask, other=0.0)
            v = tl.load(v_ptr + v_offsets, mask=mask, other=0.0)
            age = rows[:, None] + (num_keys - num_queries) - cols[None, :]
            hidden = (age < 0) | (age >= window)
            scores = tl.where(hidden, float("-inf"), tl.dot(q, tl.trans(k), input_precision="ieee") * scale)
            risen = tl.maximum(peak, tl.max(scores, 1))
            shift = tl.where(risen > float("-inf"), risen, 0.0)
            weights = tl.exp(scores - shift[:, None])
            shrink = tl.exp(peak - shift)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            peak = risen
    seen = total > 0.0
    safe = tl.where(seen, total, 1.0)
    places = (batch * tl.num_programs(1) + head) * num_queries + rows
    out_offsets = places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, (acc / safe[:, None]).to(q.dtype), mask=row_there[:, None] & channels[None, :])
    tl.store(lse_ptr + places, tl.where(seen, peak + tl.log(safe), float("-inf")), mask=row_there)


def sliding_window_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, scale: float | None = None, block_q: int = 64
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, one tile of queries at a time over just the keys that one of them sees.

    Arguments, results and errors as for `sliding_window_attention`.
    """
    check_attention(q, k, v)
    check_count("window", window, 1)
    check_tile("block_q", block_q)
    factor = score_scale(scale, q.shape[-1])
    owner = [head // (q.shape[1] // k.shape[1]) for head in range(q.shape[1])]
    out = torch.zeros(q.shape)
    log_sum_exp = torch.full(q.shape[:-1], -math.inf)
    for row in range(q.shape[2]):
        end = k.shape[2] - q.shape[2] + row + 1
        if end <= 0:
            continue
        newest = slice(max(0, end - window), end)
        scores = (k[:, owner, newest].float() * q[:, :, row, None].float()).sum(-1) * factor
        peak = scores.amax(-1, keepdim=True)
        weights = (scores - peak).exp()
        total = weights.sum(-1, keepdim=True)
        out[:, :, row] = ((weights / total)[..., None] * v[:, owner, newest].float()).sum(2)
        log_sum_exp[:, :, row] = (peak + total.log()).squeeze(-1)
    return out.to(q.dtype), log_sum_exp


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 32,
) -> tuple[Tensor, Tensor]:
    """Causal attention in which each query sees the newest `window` keys up to its own position.

    Args:
        q: queries `[batch, heads, num_queries, head_dim]`, any strides; the last tokens of the sequence.
        k: keys `[batch, kv_heads, num_keys, head_dim]`, any strides; query head h reads kv head
            `h // (heads // kv_heads)`.
        v: values, same shape as `k`, any strides.
        window: query i, at position p = i + num_keys - num_queries, sees key j only if p - window < j <= p.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        block_q: queries in a tile, a power of two from 16.
        block_k: keys in a tile, likewise.

    Returns:
        The output, of q's shape and dtype, and the log-sum-exp of each row's scaled scores, fp32
        `[batch, heads, num_queries]`; 0 and -inf for rows without keys.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or a number is not allowed.

    Source: Jiang et al. 2023 (2310.06825) for its use in Mistral 7B.
    """
    check_attention(q, k, v)
    check_count("window", window, 1)
    check_tile("block_q", block_q)
    check_tile("block_k", block_k)
    factor = score_scale(scale, q.shape[-1])
    if backend(q, k, v) == "twin":
        return sliding_window_attention_torch(q, k, v, window, scale=scale, block_q=block_q)
    batch, heads, num_queries, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    log_sum_exp = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=q.device)
    launch(
        sliding_window_kernel,
        (triton.cdiv(num_queries, block_q), heads, batch),
        *(q, k, v, out, log_sum_exp),
        *(*q.stride(), *k.stride(), *v.stride()),
        *(factor, num_queries, k.shape[2], heads // k.shape[1], window),
        HEAD_DIM=head_dim,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_stages=2,
    )
    return out, log_sum_exp
