"""No early return: a tile behind its sequence's end has no keys to look at and no row to store."""

from __future__ import annotations

import math

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
    q_begin = tl.load(cu_q_ptr + sequence).to(tl.int64)
    q_end = tl.load(cu_q_ptr + sequence + 1).to(tl.int64)
    k_begin = tl.load(cu_k_ptr + sequence).to(tl.int64)
    k_end = tl.load(cu_k_ptr + sequence + 1).to(tl.int64)
    # Places in the packed tensors, for rows and columns alike.
    rows = q_begin + tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_there = rows < q_end
    channels = dims < HEAD_DIM
    q_offsets = rows[:, None] * q_stride_t + head * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=row_there[:, None] & channels[None, :], other=0.0)
    first_key = k_end - q_end
    last = tl.minimum(q_begin + (tile + 1) * BLOCK_Q, q_end)
    end = k_end
    if CAUSAL:
        end = tl.minimum(end, last + first_key)
    end = tl.where(q_begin + tile * BLOCK_Q < q_end, end, k_begin)
    kv_head = head // group_size
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(k_begin, end, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        there = cols < k_end
        k_offsets = cols[None, :] * k_stride_t + kv_head * k_stride_h + dims[:, None] * k_stride_d
        v_offsets = cols[:, None] * v_stride_t + kv_head * v_stride_h + dims[None, :] * v_stride_d
        k = tl.load(k_ptr + k_offsets, mask=channels[:, None] & there[None, :], other=0.0)
        v = tl.load(v_ptr + v_offsets, mask=there[:, None] & channels[None, :], other=0.0)
        hidden = ~there[None, :]
        if CAUSAL:
            hidden = hidden | (cols[None, :] > rows[:, None] + first_key)
        scores = tl.where(hidden, float("-inf"), tl.dot(q, k, input_precision="ieee") * scale)
        risen = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(risen > float("-inf"), risen, 0.0)
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = risen
    seen = total > 0.0
    safe = tl.where(seen, total, 1.0)
    places = rows * heads + head
    out_offsets = places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, (acc / safe[:, None]).to(q.dtype), mask=row_there[:, None] & channels[None, :])
    tl.store(lse_ptr + places, tl.where(seen, peak + tl.log(safe), float("-inf")), mask=row_there)


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
    owner = [head // (q.shape[1] // k.shape[1]) for head in range(q.shape[1])]
    out = torch.zeros(q.shape)
    log_sum_exp = torch.full(q.shape[:2], -math.inf)
    for sequence in range(len(cu_seqlens_q) - 1):
        (q_begin, q_end), (k_begin, k_end) = (b[sequence : sequence + 2].tolist() for b in (cu_seqlens_q, cu_seqlens_k))
        for token in range(q_begin, q_end):
            end = k_end - (q_end - 1 - token) if causal else k_end
            if end <= k_begin:
                continue
            scores = (k[k_begin:end, owner].float() * q[token].float()).sum(-1) * factor
            peak = scores.amax(0)
            weights = (scores - peak).exp()
            out[token] = (weights[..., None] * v[k_begin:end, owner].float()).sum(0) / weights.sum(0)[:, None]
            log_sum_exp[token] = peak + weights.sum(0).log()
    return out.to(q.dtype), log_sum_exp


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
