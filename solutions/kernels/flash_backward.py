"""Task 7: FlashAttention's backward pass, which computes the weights again instead of reading them."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_attention, check_output, check_tile, score_scale
from labkit.launch import backend, launch
from labkit.tuning import TileConfig, tuned

# As for the forward pass: each fits 99 KiB of shared memory. The tile that stays is larger than the one that passes.
TILES = (
    TileConfig.of(BLOCK_STAY=32, BLOCK_PASS=16, num_warps=4, num_stages=1),
    TileConfig.of(BLOCK_STAY=32, BLOCK_PASS=32, num_warps=4, num_stages=1),
)
TILES_16_BIT = (
    *TILES,
    TileConfig.of(BLOCK_STAY=64, BLOCK_PASS=32, num_warps=4, num_stages=2),
    TileConfig.of(BLOCK_STAY=64, BLOCK_PASS=64, num_warps=8, num_stages=1),
)


@triton.jit
def flash_query_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
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
    grad_out_stride_b,
    grad_out_stride_h,
    grad_out_stride_t,
    grad_out_stride_d,
    scale,
    num_queries,
    num_keys,
    group_size,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_STAY: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dQ of one tile of queries, while key tiles pass; also writes delta. Program (tile, head, batch row).

    lse and delta are contiguous [b, h, t], dq is contiguous [b, h, t, d].
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    rows = tile * BLOCK_STAY + tl.arange(0, BLOCK_STAY).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    row_number = (batch * tl.num_programs(1) + head) * num_queries + rows
    # BEGIN SOLUTION
    kv_head = head // group_size
    row_mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = q_ptr + batch * q_stride_b + head * q_stride_h
    q = tl.load(q_tile + rows[:, None] * q_stride_t + dims[None, :] * q_stride_d, mask=row_mask, other=0.0)
    out_tile = out_ptr + batch * out_stride_b + head * out_stride_h
    out = tl.load(out_tile + rows[:, None] * out_stride_t + dims[None, :] * out_stride_d, mask=row_mask, other=0.0)
    grad_tile = grad_out_ptr + batch * grad_out_stride_b + head * grad_out_stride_h
    grad_offsets = rows[:, None] * grad_out_stride_t + dims[None, :] * grad_out_stride_d
    grad_out = tl.load(grad_tile + grad_offsets, mask=row_mask, other=0.0)
    lse = tl.load(lse_ptr + row_number, mask=rows < num_queries, other=float("-inf"))

    # The sum over keys of P · dP, which the softmax's derivative subtracts, from what lies here already.
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), axis=1)
    tl.store(delta_ptr + row_number, delta, mask=rows < num_queries)

    offset = num_keys - num_queries
    end = num_keys
    if CAUSAL:
        last_row = tl.minimum((tile + 1) * BLOCK_STAY, num_queries) - 1
        end = tl.minimum(num_keys, last_row + offset + 1)
    k_head = k_ptr + batch * k_stride_b + kv_head * k_stride_h
    v_head = v_ptr + batch * v_stride_b + kv_head * v_stride_h
    dq = tl.zeros([BLOCK_STAY, BLOCK_D], tl.float32)
    for start in range(0, end, BLOCK_PASS):
        cols = start + tl.arange(0, BLOCK_PASS).to(tl.int64)
        col_mask = (cols < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_head + cols[:, None] * k_stride_t + dims[None, :] * k_stride_d, mask=col_mask, other=0.0)
        v = tl.load(v_head + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d, mask=col_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = (rows < num_queries)[:, None] & (cols < num_keys)[None, :]
        if CAUSAL:
            visible = visible & (cols[None, :] <= rows[:, None] + offset)
        # Masked before exp: the score 0 of a key that isn't there minus a very negative LSE would overflow.
        weights = tl.exp(tl.where(visible, scores - lse[:, None], float("-inf")))
        grad_weights = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[:, None])
        dq += tl.dot(grad_scores.to(k.dtype), k, input_precision="ieee")
    dq_rows = dq_ptr + row_number[:, None] * HEAD_DIM
    tl.store(dq_rows + dims[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=row_mask)
    # END SOLUTION


@triton.jit
def flash_key_value_grad_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
    grad_out_stride_b,
    grad_out_stride_h,
    grad_out_stride_t,
    grad_out_stride_d,
    scale,
    num_queries,
    num_keys,
    group_size,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_STAY: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dK and dV of one tile of keys, while query tiles of the whole group pass. Program (tile, kv head, batch row).

    lse and delta are contiguous [b, h, t], dk and dv are contiguous [b, kv_h, t, d].
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    cols = tile * BLOCK_STAY + tl.arange(0, BLOCK_STAY).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    # BEGIN SOLUTION
    col_mask = (cols < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
    k_tile = k_ptr + batch * k_stride_b + kv_head * k_stride_h
    v_tile = v_ptr + batch * v_stride_b + kv_head * v_stride_h
    k = tl.load(k_tile + cols[:, None] * k_stride_t + dims[None, :] * k_stride_d, mask=col_mask, other=0.0)
    v = tl.load(v_tile + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d, mask=col_mask, other=0.0)

    # The first query that sees the tile's first key: those before it see none of the tile.
    offset = num_keys - num_queries
    first = 0
    if CAUSAL:
        first = tl.maximum(0, tile * BLOCK_STAY - offset) // BLOCK_PASS * BLOCK_PASS
    dk = tl.zeros([BLOCK_STAY, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_STAY, BLOCK_D], tl.float32)
    # A key is read by all heads of its group, so its gradient is the sum of theirs.
    for member in range(group_size):
        head = kv_head * group_size + member
        q_head = q_ptr + batch * q_stride_b + head * q_stride_h
        grad_head = grad_out_ptr + batch * grad_out_stride_b + head * grad_out_stride_h
        head_row = (batch * kv_heads * group_size + head) * num_queries
        for start in range(first, num_queries, BLOCK_PASS):
            rows = start + tl.arange(0, BLOCK_PASS).to(tl.int64)
            row_mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
            q = tl.load(q_head + rows[:, None] * q_stride_t + dims[None, :] * q_stride_d, mask=row_mask, other=0.0)
            grad_offsets = rows[:, None] * grad_out_stride_t + dims[None, :] * grad_out_stride_d
            grad_out = tl.load(grad_head + grad_offsets, mask=row_mask, other=0.0)
            lse = tl.load(lse_ptr + head_row + rows, mask=rows < num_queries, other=float("-inf"))
            delta = tl.load(delta_ptr + head_row + rows, mask=rows < num_queries, other=0.0)
            # Keys down, queries across: then the products below need no transposed weights.
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
            visible = (cols < num_keys)[:, None] & (rows < num_queries)[None, :]
            if CAUSAL:
                visible = visible & (cols[:, None] <= rows[None, :] + offset)
            weights = tl.exp(tl.where(visible, scores - lse[None, :], float("-inf")))
            dv += tl.dot(weights.to(grad_out.dtype), grad_out, input_precision="ieee")
            grad_weights = tl.dot(v, tl.trans(grad_out), input_precision="ieee")
            grad_scores = weights * (grad_weights - delta[None, :])
            dk += tl.dot(grad_scores.to(q.dtype), q, input_precision="ieee")
    tile_offsets = ((batch * kv_heads + kv_head) * num_keys + cols[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(dk_ptr + tile_offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=col_mask)
    tl.store(dv_ptr + tile_offsets, dv.to(dv_ptr.dtype.element_ty), mask=col_mask)
    # END SOLUTION


def flash_attention_backward_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    grad_out: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_k: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same gradients in plain torch, one tile of keys at a time; all heads and queries at once.

    Arguments, results and errors as for `flash_attention_backward`.
    """
    _check_backward(q, k, v, out, log_sum_exp, grad_out)
    check_tile("block_k", block_k)
    factor = score_scale(scale, q.shape[-1])
    # BEGIN SOLUTION
    num_queries, num_keys = q.shape[2], k.shape[2]
    group = (k.shape[0], k.shape[1], q.shape[1] // k.shape[1])
    queries, grads, outs = (t.float().reshape(*group, num_queries, q.shape[-1]) for t in (q, grad_out, out))
    lse = log_sum_exp.reshape(*group, num_queries, 1)
    rows = torch.arange(num_queries, device=q.device)
    delta = (outs * grads).sum(-1, keepdim=True)
    dq = torch.zeros_like(queries)
    dk, dv = (torch.empty(t.shape, dtype=torch.float32, device=q.device) for t in (k, v))
    for start in range(0, num_keys, block_k):
        stop = min(start + block_k, num_keys)
        keys, values = (t[:, :, start:stop].float().unsqueeze(2) for t in (k, v))
        exponents = queries @ keys.transpose(-1, -2) * factor - lse
        if causal:
            cols = torch.arange(start, stop, device=q.device)
            exponents = exponents.masked_fill(cols > rows[:, None] + num_keys - num_queries, -math.inf)
        weights = exponents.exp()
        grad_scores = weights * (grads @ values.transpose(-1, -2) - delta)
        dq += grad_scores @ keys * factor
        dk[:, :, start:stop] = (grad_scores.transpose(-1, -2) @ queries).sum(2) * factor
        dv[:, :, start:stop] = (weights.transpose(-1, -2) @ grads).sum(2)
    return dq.reshape(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    # END SOLUTION


def flash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    grad_out: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention, from its inputs, its output and one number per row.

    Args:
        q: queries `[batch, heads, num_queries, head_dim]`, any strides.
        k: keys `[batch, kv_heads, num_keys, head_dim]`, any strides.
        v: values, same shape as `k`, any strides.
        out: the forward pass's output, of q's shape, any strides.
        log_sum_exp: its log-sum-exp, fp32 `[batch, heads, num_queries]`; -inf for rows without keys.
        grad_out: gradient of the output, of q's shape, any strides.
        causal: as in the forward pass.
        scale: as in the forward pass.
        block_q: queries in a tile, a power of two from 16; None leaves it to the launcher.
        block_k: keys in a tile, likewise.

    Returns:
        dq, dk and dv, of the shapes and dtypes of q, k and v; dk and dv are summed over the query heads of each group.
        Rows without keys have gradient 0 and contribute none.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or a tile size or the scale is not allowed.

    Source: Dao 2023 (2307.08691), algorithm 2, with dQ in a kernel of its own so that no sum needs atomics.
    """
    _check_backward(q, k, v, out, log_sum_exp, grad_out)
    if (block_q is None) != (block_k is None):
        raise ValueError(f"give both block_q and block_k, or neither; got {block_q} and {block_k}")
    tune = block_q is None or block_k is None
    if block_q is None or block_k is None:
        block_q, block_k = 32, 32
    check_tile("block_q", block_q)
    check_tile("block_k", block_k)
    factor = score_scale(scale, q.shape[-1])
    where = backend(q, k, v, out, log_sum_exp, grad_out)
    if where == "twin":
        return flash_attention_backward_torch(
            q, k, v, out, log_sum_exp, grad_out, causal=causal, scale=scale, block_k=block_k
        )
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1], k.shape[2]
    log_sum_exp = log_sum_exp.contiguous()
    delta = torch.empty_like(log_sum_exp)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    sizes = (factor, num_queries, num_keys, heads // kv_heads)
    meta = dict(HEAD_DIM=head_dim, CAUSAL=causal, BLOCK_D=max(16, triton.next_power_of_2(head_dim)))
    strides = (*q.stride(), *k.stride(), *v.stride())
    query_side = (q, k, v, out, grad_out, log_sum_exp, delta, dq, *strides, *out.stride(), *grad_out.stride(), *sizes)
    key_side = (q, k, v, grad_out, log_sum_exp, delta, dk, dv, *strides, *grad_out.stride(), *sizes)
    # The query side goes first: it writes delta, which the key side reads.
    if tune and where == "cuda":
        tiles = TILES if q.dtype == torch.float32 else TILES_16_BIT
        query_kernel, key_kernel = (
            tuned(kernel, tiles, ("HEAD_DIM", "CAUSAL"))
            for kernel in (flash_query_grad_kernel, flash_key_value_grad_kernel)
        )
        launch(query_kernel, lambda t: (triton.cdiv(num_queries, t["BLOCK_STAY"]), heads, batch), *query_side, **meta)
        launch(key_kernel, lambda t: (triton.cdiv(num_keys, t["BLOCK_STAY"]), kv_heads, batch), *key_side, **meta)
    else:
        grid = (triton.cdiv(num_queries, block_q), heads, batch)
        tiles_given = dict(BLOCK_STAY=block_q, BLOCK_PASS=block_k, num_stages=1)
        launch(flash_query_grad_kernel, grid, *query_side, **meta, **tiles_given)
        grid = (triton.cdiv(num_keys, block_k), kv_heads, batch)
        tiles_given = dict(BLOCK_STAY=block_k, BLOCK_PASS=block_q, num_stages=1)
        launch(flash_key_value_grad_kernel, grid, *key_side, **meta, **tiles_given)
    return dq, dk, dv


def _check_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, grad_out: Tensor) -> None:
    """Refuse what the forward pass couldn't have given."""
    check_attention(q, k, v)
    check_output("out", out, q)
    check_output("grad_out", grad_out, q)
    check_output("log_sum_exp", log_sum_exp, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
