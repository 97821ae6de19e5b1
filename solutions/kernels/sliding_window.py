"""Task 13: causal attention to the newest keys only, whose cost no longer grows with all that came before."""

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
    # BEGIN SOLUTION
    kv_head = head // group_size
    row_mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = q_ptr + batch * q_stride_b + head * q_stride_h
    q = tl.load(q_tile + rows[:, None] * q_stride_t + dims[None, :] * q_stride_d, mask=row_mask, other=0.0)
    k_head = k_ptr + batch * k_stride_b + kv_head * k_stride_h
    v_head = v_ptr + batch * v_stride_b + kv_head * v_stride_h

    # From the first query's oldest key, rounded down to a tile, to the last query's newest.
    offset = num_keys - num_queries
    first_row = tile * BLOCK_Q
    last_row = tl.minimum(first_row + BLOCK_Q, num_queries) - 1
    begin = tl.maximum(0, first_row + offset - window + 1) // BLOCK_K * BLOCK_K
    end = tl.minimum(num_keys, last_row + offset + 1)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        col_mask = (cols < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_head + cols[:, None] * k_stride_t + dims[None, :] * k_stride_d, mask=col_mask, other=0.0)
        v = tl.load(v_head + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d, mask=col_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        positions = rows[:, None] + offset
        visible = (cols[None, :] <= positions) & (cols[None, :] > positions - window)
        scores = tl.where(visible & (cols < num_keys)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # The tile's first keys are too old for its last queries, which have seen nothing then.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / divisor[:, None]
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(divisor))
    places = (batch * tl.num_programs(1) + head) * num_queries + rows
    out_offsets = places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)
    tl.store(lse_ptr + places, lse, mask=rows < num_queries)
    # END SOLUTION


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
    # BEGIN SOLUTION
    group = (k.shape[0], k.shape[1], q.shape[1] // k.shape[1])
    num_queries, num_keys = q.shape[2], k.shape[2]
    outs, lses = [], []
    for first in range(0, num_queries, block_q):
        positions = torch.arange(first, min(first + block_q, num_queries), device=q.device) + num_keys - num_queries
        begin, end = max(0, int(positions[0]) - window + 1), max(0, int(positions[-1]) + 1)
        cols = torch.arange(begin, max(begin, end), device=q.device)
        queries = q[:, :, first : first + block_q].float().reshape(*group, len(positions), q.shape[-1])
        keys, values = (t[:, :, begin:end].float().unsqueeze(2) for t in (k, v))
        hidden = (cols > positions[:, None]) | (cols <= positions[:, None] - window)
        scores = (queries @ keys.transpose(-1, -2) * factor).masked_fill(hidden, -math.inf)
        # Of queries that see no key the column of -inf is all there is.
        peak = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(-1, keepdim=True)
        weights = (scores - peak.masked_fill(peak == -math.inf, 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        outs.append((weights @ values / total.masked_fill(total == 0, 1.0)).flatten(1, 2))
        lses.append((peak + total.log()).flatten(1, 2).squeeze(-1))
    if not outs:
        return torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)
    # END SOLUTION


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
