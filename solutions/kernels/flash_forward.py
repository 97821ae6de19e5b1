"""Task 6: FlashAttention's forward pass, which never writes a score to memory."""

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
    # BEGIN SOLUTION
    kv_head = head // group_size
    row_mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = q_ptr + batch * q_stride_b + head * q_stride_h
    q = tl.load(q_tile + rows[:, None] * q_stride_t + dims[None, :] * q_stride_d, mask=row_mask, other=0.0)
    k_head = k_ptr + batch * k_stride_b + kv_head * k_stride_h
    v_head = v_ptr + batch * v_stride_b + kv_head * v_stride_h

    # Query i stands at position i + offset among the keys.
    offset = num_keys - num_queries
    end = num_keys
    if CAUSAL:
        last_row = tl.minimum((tile + 1) * BLOCK_Q, num_queries) - 1
        end = tl.minimum(num_keys, last_row + offset + 1)

    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, end, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        col_mask = (cols < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_head + cols[:, None] * k_stride_t + dims[None, :] * k_stride_d, mask=col_mask, other=0.0)
        v = tl.load(v_head + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d, mask=col_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = (cols < num_keys)[None, :]
        if CAUSAL:
            visible = visible & (cols[None, :] <= rows[:, None] + offset)
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen no key yet has the maximum -inf, and -inf - (-inf) is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max

    # FlashAttention-2: normalise once, after the loop. A row without keys has the sum 0: its output is 0.
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / divisor[:, None]
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(divisor))
    out_tile = out_ptr + batch * out_stride_b + head * out_stride_h
    out_offsets = rows[:, None] * out_stride_t + dims[None, :] * out_stride_d
    tl.store(out_tile + out_offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)
    lse_row = lse_ptr + (batch * tl.num_programs(1) + head) * num_queries
    tl.store(lse_row + rows, lse, mask=rows < num_queries)
    # END SOLUTION


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
    # BEGIN SOLUTION
    (batch, heads, num_queries, head_dim), (_, kv_heads, num_keys, _) = q.shape, k.shape
    offset = num_keys - num_queries
    # An axis for the group lets the heads of one group share keys and values by broadcasting.
    queries = q.float().reshape(batch, kv_heads, heads // kv_heads, num_queries, head_dim)
    keys, values = k.float().unsqueeze(2), v.float().unsqueeze(2)
    out = torch.empty_like(queries)
    log_sum_exp = torch.empty(queries.shape[:-1], dtype=torch.float32, device=q.device)
    for first in range(0, num_queries, block_q):
        tile = queries[:, :, :, first : first + block_q]
        rows = torch.arange(first, first + tile.shape[3], device=q.device)
        end = min(num_keys, int(rows[-1]) + offset + 1) if causal else num_keys
        row_max = torch.full(tile.shape[:-1], -math.inf, device=q.device)
        row_sum = torch.zeros_like(row_max)
        acc = torch.zeros_like(tile)
        for start in range(0, end, block_k):
            stop = min(start + block_k, num_keys)
            scores = tile @ keys[..., start:stop, :].transpose(-1, -2) * factor
            if causal:
                cols = torch.arange(start, stop, device=q.device)
                scores = scores.masked_fill(cols > rows[:, None] + offset, -math.inf)
            new_max = torch.maximum(row_max, scores.amax(-1))
            shift = new_max.masked_fill(new_max == -math.inf, 0.0)
            weights = (scores - shift[..., None]).exp()
            rescale = (row_max - shift).exp()
            row_sum = row_sum * rescale + weights.sum(-1)
            acc = acc * rescale[..., None] + weights @ values[..., start:stop, :]
            row_max = new_max
        divisor = row_sum.masked_fill(row_sum == 0, 1.0)
        out[:, :, :, first : first + block_q] = acc / divisor[..., None]
        # log(0) of a row without keys is -inf, as it should be, and its maximum is -inf too.
        log_sum_exp[:, :, :, first : first + block_q] = row_max + row_sum.log()
    return out.reshape(q.shape).to(q.dtype), log_sum_exp.reshape(q.shape[:-1])
    # END SOLUTION


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
    tune = block_q is None or block_k is None
    if block_q is None or block_k is None:
        block_q, block_k = 64, 32
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
