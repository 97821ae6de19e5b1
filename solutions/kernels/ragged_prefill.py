"""Task 12: prefill of sequences of different lengths, laid end to end without padding."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_alike, check_heads, check_tile, score_scale
from labkit.checks import check_count
from labkit.launch import backend, launch


@triton.jit
def ragged_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cu_q_ptr,
    cu_k_ptr,
    out_ptr,
    lse_ptr,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    v_stride_t,
    v_stride_h,
    v_stride_d,
    scale,
    group_size,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of one sequence's queries, of one head: program (tile, head, sequence).

    The grid has tiles for the longest sequence; others need fewer. out is contiguous [tokens, h, d], lse [tokens, h].
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    heads = tl.num_programs(1)
    dims = tl.arange(0, BLOCK_D)
    # BEGIN SOLUTION
    q_begin = tl.load(cu_q_ptr + sequence).to(tl.int64)
    k_begin = tl.load(cu_k_ptr + sequence).to(tl.int64)
    num_queries = (tl.load(cu_q_ptr + sequence + 1) - q_begin).to(tl.int32)
    num_keys = (tl.load(cu_k_ptr + sequence + 1) - k_begin).to(tl.int32)
    if tile * BLOCK_Q >= num_queries:
        return

    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = q_begin + rows
    q_offsets = tokens[:, None] * q_stride_t + head * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=row_mask, other=0.0)
    kv_head = head // group_size
    offset = num_keys - num_queries
    end = num_keys
    if CAUSAL:
        last_row = tl.minimum((tile + 1) * BLOCK_Q, num_queries) - 1
        end = tl.minimum(num_keys, last_row + offset + 1)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, end, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        col_mask = (cols < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
        places = (k_begin + cols)[:, None]
        k_offsets = places * k_stride_t + kv_head * k_stride_h + dims[None, :] * k_stride_d
        v_offsets = places * v_stride_t + kv_head * v_stride_h + dims[None, :] * v_stride_d
        k = tl.load(k_ptr + k_offsets, mask=col_mask, other=0.0)
        v = tl.load(v_ptr + v_offsets, mask=col_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # Behind the last key lies the next sequence's first, a number like any other.
        visible = (cols < num_keys)[None, :]
        if CAUSAL:
            visible = visible & (cols[None, :] <= rows[:, None] + offset)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / divisor[:, None]
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(divisor))
    places = tokens * heads + head
    out_offsets = places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)
    tl.store(lse_ptr + places, lse, mask=rows < num_queries)
    # END SOLUTION


def ragged_prefill_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, sequence by sequence. Arguments, results and errors as for `ragged_prefill`."""
    _check_ragged(q, k, v, cu_seqlens_q, cu_seqlens_k)
    factor = score_scale(scale, q.shape[-1])
    # BEGIN SOLUTION
    heads, kv_heads = q.shape[1], k.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_sum_exp = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for (q_begin, q_end), (k_begin, k_end) in zip(
        pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True
    ):
        num_queries, num_keys = q_end - q_begin, k_end - k_begin
        # [kv_heads, group, tokens, head_dim]; the group shares keys and values by broadcasting.
        queries = q[q_begin:q_end].float().transpose(0, 1).unflatten(0, (kv_heads, heads // kv_heads))
        keys, values = (t[k_begin:k_end].float().transpose(0, 1).unsqueeze(1) for t in (k, v))
        scores = queries @ keys.transpose(-1, -2) * factor
        if causal:
            hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(num_keys - num_queries + 1), -math.inf)
        # Of a sequence without keys the column of -inf is all there is.
        peak = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(-1, keepdim=True)
        weights = (scores - peak.masked_fill(peak == -math.inf, 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        mean = weights @ values / total.masked_fill(total == 0, 1.0)
        out[q_begin:q_end] = mean.flatten(0, 1).transpose(0, 1).to(q.dtype)
        log_sum_exp[q_begin:q_end] = (peak + total.log()).flatten(0, 1).squeeze(-1).transpose(0, 1)
    return out, log_sum_exp
    # END SOLUTION


def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 32,
) -> tuple[Tensor, Tensor]:
    """Attention within each of several sequences, in one launch and without padding.

    Args:
        q: queries of all sequences, end to end `[tokens, heads, head_dim]`, any strides.
        k: keys `[key_tokens, kv_heads, head_dim]`, any strides; query head h reads kv head `h // (heads // kv_heads)`.
        v: values, same shape as `k`, any strides.
        cu_seqlens_q: int32 or int64 `[sequences + 1]`: sequence s has the queries from cu_seqlens_q[s] up to
            cu_seqlens_q[s + 1], so that the first number is 0 and the last `tokens`.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: queries of the longest sequence, or more; it sizes the grid.
        causal: query i of a sequence sees its key j only if j <= i + num_keys - num_queries.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        block_q: queries in a tile, a power of two from 16.
        block_k: keys in a tile, likewise.

    Returns:
        The output, of q's shape and dtype, and the log-sum-exp, fp32 `[tokens, heads]`; 0 and -inf for rows without
        keys.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or a number is not allowed; on a CPU also bounds that
            fall, or don't end where the tokens do. On a GPU those are the caller's to check.
    """
    _check_ragged(q, k, v, cu_seqlens_q, cu_seqlens_k)
    check_count("max_seqlen_q", max_seqlen_q, 0)
    if cu_seqlens_q.device.type == "cpu" and int(cu_seqlens_q.diff().max()) > max_seqlen_q:
        raise ValueError(
            f"a sequence has {int(cu_seqlens_q.diff().max())} queries, more than max_seqlen_q={max_seqlen_q}"
        )
    check_tile("block_q", block_q)
    check_tile("block_k", block_k)
    factor = score_scale(scale, q.shape[-1])
    if backend(q, k, v, cu_seqlens_q, cu_seqlens_k) == "twin":
        return ragged_prefill_torch(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, scale=scale)
    tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    log_sum_exp = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    launch(
        ragged_prefill_kernel,
        (triton.cdiv(max_seqlen_q, block_q), heads, len(cu_seqlens_q) - 1),
        *(q, k, v, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), out, log_sum_exp),
        *(*q.stride(), *k.stride(), *v.stride()),
        *(factor, heads // k.shape[1]),
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_stages=2,
    )
    return out, log_sum_exp


def _check_ragged(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Refuse what doesn't fit together, before anything is computed."""
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape:
        raise ValueError(
            "q must have shape [tokens, heads, head_dim], k and v both [key_tokens, kv_heads, head_dim]; got "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    check_alike(q=q, k=k, v=v)
    check_heads(q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    for name, bounds, tokens in (("cu_seqlens_q", cu_seqlens_q, len(q)), ("cu_seqlens_k", cu_seqlens_k, len(k))):
        is_bounds = bounds.dtype in (torch.int32, torch.int64) and bounds.dim() == 1 and len(bounds) >= 2
        if not is_bounds or len(bounds) != len(cu_seqlens_q):
            raise ValueError(
                f"{name} must be int32 or int64 with one number more than there are sequences, as the other has; "
                f"got {bounds.dtype} {list(bounds.shape)}"
            )
        if bounds.device.type != "cpu":
            continue
        if bounds[0] != 0 or bounds[-1] != tokens or bool((bounds.diff() < 0).any()):
            raise ValueError(f"{name} must rise from 0 to the {tokens} tokens given, got {bounds.tolist()}")
