"""Whole tiles first, without a mask, then the rest; powers of two instead of e."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_attention, check_output, check_tile, score_scale
from labkit.launch import backend, launch
from labkit.tuning import TileConfig, tuned

# Few, and each fits the 99 KiB of shared memory of a small card: fp32 tiles take twice the room of 16-bit ones.
TILES = (
    TileConfig.of(BLOCK_Q=64, BLOCK_K=32, num_warps=4, num_stages=2),
    TileConfig.of(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=1),
)
TILES_16_BIT = (
    *TILES,
    TileConfig.of(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3),
    TileConfig.of(BLOCK_Q=128, BLOCK_K=64, num_warps=8, num_stages=2),
)


@triton.jit
def flash_forward_kernel(
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
    out_stride_b,
    out_stride_h,
    out_stride_t,
    out_stride_d,
    scale,
    num_queries,
    num_keys,
    group_size,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of BLOCK_Q queries of one head: program (tile, head, batch row). lse is contiguous [b, h, t]."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    # Offsets in 64 bits: tokens times a stride of all heads pass 2^31 in long contexts.
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    query_rows = rows[:, None] < num_queries
    channels = dims[None, :] < HEAD_DIM
    q_offsets = batch * q_stride_b + head * q_stride_h + rows[:, None] * q_stride_t + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=query_rows & channels, other=0.0)
    kv_head = head // group_size
    k_tile = k_ptr + batch * k_stride_b + kv_head * k_stride_h
    v_tile = v_ptr + batch * v_stride_b + kv_head * v_stride_h

    offset = num_keys - num_queries
    first_row = tile * BLOCK_Q
    end = num_keys
    whole = num_keys // BLOCK_K * BLOCK_K
    if CAUSAL:
        end = tl.minimum(end, tl.minimum(first_row + BLOCK_Q, num_queries) + offset)
        # Tiles that the tile's first query sees to their end need no mask.
        whole = tl.minimum(whole, tl.maximum(first_row + offset + 1, 0) // BLOCK_K * BLOCK_K)
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, whole, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        k = tl.load(
            k_tile + cols[None, :] * k_stride_t + dims[:, None] * k_stride_d, mask=(dims < HEAD_DIM)[:, None], other=0.0
        )
        v = tl.load(v_tile + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d, mask=channels, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * (scale * 1.4426950408889634)
        risen = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - risen[:, None])
        shrink = tl.exp2(peak - risen)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = risen
    for start in range(whole, end, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        there = cols < num_keys
        k_mask = (dims < HEAD_DIM)[:, None] & there[None, :]
        k = tl.load(k_tile + cols[None, :] * k_stride_t + dims[:, None] * k_stride_d, mask=k_mask, other=0.0)
        v = tl.load(
            v_tile + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d, mask=there[:, None] & channels, other=0.0
        )
        hidden = ~there[None, :]
        if CAUSAL:
            hidden = hidden | (cols[None, :] > rows[:, None] + offset)
        scores = tl.dot(q, k, input_precision="ieee") * (scale * 1.4426950408889634)
        scores = tl.where(hidden, float("-inf"), scores)
        risen = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(risen > float("-inf"), risen, 0.0)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = risen

    seen = total > 0.0
    acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    out_offsets = (
        batch * out_stride_b + head * out_stride_h + rows[:, None] * out_stride_t + dims[None, :] * out_stride_d
    )
    tl.store(out_ptr + out_offsets, acc.to(q.dtype), mask=query_rows & channels)
    natural = (peak + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453
    lse_offsets = (batch * tl.num_programs(1) + head) * num_queries + rows
    tl.store(lse_ptr + lse_offsets, tl.where(seen, natural, float("-inf")), mask=rows < num_queries)


def flash_attention_forward_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
) -> tuple[Tensor, Tensor]:
    """The same computation in plain torch, tile by tile; all heads at once.

    Arguments, results and errors as for `flash_attention_forward`.
    """
    check_attention(q, k, v)
    check_tile("block_q", block_q)
    check_tile("block_k", block_k)
    factor = score_scale(scale, q.shape[-1])
    group_size = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    log_sum_exp = torch.full(q.shape[:-1], -math.inf, dtype=torch.float32, device=q.device)
    for head in range(q.shape[1]):
        keys, values = k[:, head // group_size].float(), v[:, head // group_size].float()
        for row in range(q.shape[2]):
            visible = k.shape[2] - q.shape[2] + row + 1 if causal else k.shape[2]
            if visible <= 0:
                continue
            scores = (keys[:, :visible] * q[:, head, row, None].float()).sum(-1) * factor
            peak = scores.amax(-1, keepdim=True)
            weights = (scores - peak).exp()
            total = weights.sum(-1, keepdim=True)
            out[:, head, row] = ((weights / total)[..., None] * values[:, :visible]).sum(1)
            log_sum_exp[:, head, row] = (peak + total.log()).squeeze(-1)
    return out.to(q.dtype), log_sum_exp


def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention in memory that grows with T, not with T².

    Scores, softmax and accumulator are fp32. The two products take their operands in the inputs' dtype, as matrix
    units do; fp32 inputs are multiplied as fp32, not as TF32.

    Args:
        q: queries `[batch, heads, num_queries, head_dim]`, any strides.
        k: keys `[batch, kv_heads, num_keys, head_dim]`, any strides; query head h reads kv head
            `h // (heads // kv_heads)`.
        v: values, same shape as `k`, any strides.
        causal: query i sees key j only if j <= i + num_keys - num_queries.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        block_q: queries in a tile, a power of two from 16; None leaves it to the launcher.
        block_k: keys in a tile, likewise.
        out: where to write the output, any strides; None takes new memory.

    Returns:
        The output, of q's shape and dtype, and the log-sum-exp of each row's scaled scores, natural and in fp32
        `[batch, heads, num_queries]`. A row without keys gives 0 and -inf.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or a tile size or the scale is not allowed.

    Source: Dao et al. 2022 (2205.14135); Dao 2023 (2307.08691).
    """
    check_attention(q, k, v)
    if (block_q is None) != (block_k is None):
        raise ValueError(f"give both block_q and block_k, or neither; got {block_q} and {block_k}")
    tune = block_q is None
    block_q, block_k = block_q or 64, block_k or 32
    check_tile("block_q", block_q)
    check_tile("block_k", block_k)
    factor = score_scale(scale, q.shape[-1])
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check_output("out", out, q)
    where = backend(q, k, v)
    if where == "twin":
        result, log_sum_exp = flash_attention_forward_torch(
            q, k, v, causal=causal, scale=scale, block_q=block_q, block_k=block_k
        )
        return out.copy_(result), log_sum_exp
    batch, heads, num_queries, head_dim = q.shape
    log_sum_exp = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=q.device)
    arguments = (
        *(q, k, v, out, log_sum_exp),
        *(*q.stride(), *k.stride(), *v.stride(), *out.stride()),
        *(factor, num_queries, k.shape[2], heads // k.shape[1]),
    )
    meta = dict(HEAD_DIM=head_dim, CAUSAL=causal, BLOCK_D=max(16, triton.next_power_of_2(head_dim)))
    if tune and where == "cuda":
        tiles = TILES if q.dtype == torch.float32 else TILES_16_BIT
        kernel = tuned(flash_forward_kernel, tiles, ("HEAD_DIM", "CAUSAL"))
        launch(kernel, lambda tile: (triton.cdiv(num_queries, tile["BLOCK_Q"]), heads, batch), *arguments, **meta)
    else:
        grid = (triton.cdiv(num_queries, block_q), heads, batch)
        launch(flash_forward_kernel, grid, *arguments, **meta, BLOCK_Q=block_q, BLOCK_K=block_k, num_stages=2)
    return out, log_sum_exp
