"""Scores the other way round: keys down for dQ, queries down for dK and dV."""

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
    query_there = rows < num_queries
    channels = dims < HEAD_DIM
    base = batch * q_stride_b + head * q_stride_h
    q_down = tl.load(
        q_ptr + base + dims[:, None] * q_stride_d + rows[None, :] * q_stride_t,
        mask=channels[:, None] & query_there[None, :],
        other=0.0,
    )
    base = batch * out_stride_b + head * out_stride_h
    out = tl.load(
        out_ptr + base + dims[:, None] * out_stride_d + rows[None, :] * out_stride_t,
        mask=channels[:, None] & query_there[None, :],
        other=0.0,
    )
    base = batch * grad_out_stride_b + head * grad_out_stride_h
    grad = tl.load(
        grad_out_ptr + base + dims[:, None] * grad_out_stride_d + rows[None, :] * grad_out_stride_t,
        mask=channels[:, None] & query_there[None, :],
        other=0.0,
    )
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 0)
    tl.store(delta_ptr + row_number, delta, mask=query_there)
    lse = tl.load(lse_ptr + row_number, mask=query_there, other=0.0)
    kv_head = head // group_size
    dq = tl.zeros([BLOCK_D, BLOCK_STAY], tl.float32)
    newest = num_keys - 1
    if CAUSAL:
        newest = tl.minimum(newest, tl.minimum((tile + 1) * BLOCK_STAY, num_queries) - 1 + num_keys - num_queries)
    for number in range(tl.maximum(newest + BLOCK_PASS, 0) // BLOCK_PASS):
        cols = number * BLOCK_PASS + tl.arange(0, BLOCK_PASS).to(tl.int64)
        mask = (cols < num_keys)[:, None] & channels[None, :]
        k_offsets = batch * k_stride_b + kv_head * k_stride_h + cols[:, None] * k_stride_t + dims[None, :] * k_stride_d
        v_offsets = batch * v_stride_b + kv_head * v_stride_h + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d
        k = tl.load(k_ptr + k_offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + v_offsets, mask=mask, other=0.0)
        hidden = (cols >= num_keys)[:, None] | (rows >= num_queries)[None, :]
        if CAUSAL:
            hidden = hidden | (cols[:, None] > rows[None, :] + num_keys - num_queries)
        exponents = tl.dot(k, q_down, input_precision="ieee") * scale - lse[None, :]
        weights = tl.where(hidden, 0.0, tl.exp(tl.where(hidden, 0.0, exponents)))
        grad_scores = weights * (tl.dot(v, grad, input_precision="ieee") - delta[None, :]) * scale
        dq += tl.dot(tl.trans(k), grad_scores.to(k.dtype), input_precision="ieee")
    dq_offsets = row_number[None, :] * HEAD_DIM + dims[:, None]
    tl.store(dq_ptr + dq_offsets, dq.to(q_down.dtype), mask=channels[:, None] & query_there[None, :])


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
    key_there = cols < num_keys
    channels = dims < HEAD_DIM
    k_offsets = batch * k_stride_b + kv_head * k_stride_h + cols[None, :] * k_stride_t + dims[:, None] * k_stride_d
    v_offsets = batch * v_stride_b + kv_head * v_stride_h + cols[None, :] * v_stride_t + dims[:, None] * v_stride_d
    k = tl.load(k_ptr + k_offsets, mask=channels[:, None] & key_there[None, :], other=0.0)
    v = tl.load(v_ptr + v_offsets, mask=channels[:, None] & key_there[None, :], other=0.0)
    offset = num_keys - num_queries
    dk = tl.zeros([BLOCK_STAY, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_STAY, BLOCK_D], tl.float32)
    for start in range(0, num_queries, BLOCK_PASS):
        rows = start + tl.arange(0, BLOCK_PASS).to(tl.int64)
        useful = True
        if CAUSAL:
            useful = start + BLOCK_PASS - 1 + offset >= tile * BLOCK_STAY
        if useful:
            for head in range(kv_head * group_size, (kv_head + 1) * group_size):
                mask = (rows < num_queries)[:, None] & channels[None, :]
                base = batch * q_stride_b + head * q_stride_h
                q = tl.load(
                    q_ptr + base + rows[:, None] * q_stride_t + dims[None, :] * q_stride_d, mask=mask, other=0.0
                )
                base = batch * grad_out_stride_b + head * grad_out_stride_h
                grad_offsets = base + rows[:, None] * grad_out_stride_t + dims[None, :] * grad_out_stride_d
                grad = tl.load(grad_out_ptr + grad_offsets, mask=mask, other=0.0)
                places = (batch * kv_heads * group_size + head) * num_queries + rows
                lse = tl.load(lse_ptr + places, mask=rows < num_queries, other=0.0)
                delta = tl.load(delta_ptr + places, mask=rows < num_queries, other=0.0)
                hidden = (rows >= num_queries)[:, None] | (cols >= num_keys)[None, :]
                if CAUSAL:
                    hidden = hidden | (cols[None, :] > rows[:, None] + offset)
                exponents = tl.dot(q, k, input_precision="ieee") * scale - lse[:, None]
                weights = tl.where(hidden, 0.0, tl.exp(tl.where(hidden, 0.0, exponents)))
                grad_scores = weights * (tl.dot(grad, v, input_precision="ieee") - delta[:, None]) * scale
                dv += tl.dot(tl.trans(weights).to(grad.dtype), grad, input_precision="ieee")
                dk += tl.dot(tl.trans(grad_scores).to(q.dtype), q, input_precision="ieee")
    places = (batch * kv_heads + kv_head) * num_keys + cols
    offsets = places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(dk_ptr + offsets, dk.to(k.dtype), mask=key_there[:, None] & channels[None, :])
    tl.store(dv_ptr + offsets, dv.to(v.dtype), mask=key_there[:, None] & channels[None, :])


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
    heads, num_queries = q.shape[1:3]
    num_keys, group_size = k.shape[2], heads // k.shape[1]
    owner = [head // group_size for head in range(heads)]
    queries, grads, keys, values = q.float(), grad_out.float(), k[:, owner].float(), v[:, owner].float()
    exponents = (queries * factor) @ keys.mT - log_sum_exp[..., None]
    if causal:
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
        exponents = torch.where(hidden, -math.inf, exponents)
    weights = exponents.exp()
    grad_weights = grads @ values.mT
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True)) * factor
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    dk.index_add_(1, torch.tensor(owner), grad_scores.mT @ queries)
    dv.index_add_(1, torch.tensor(owner), weights.mT @ grads)
    return (grad_scores @ keys).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


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
    tune = block_q is None
    block_q, block_k = block_q or 32, block_k or 32
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
        sides = (
            (flash_query_grad_kernel, (triton.cdiv(num_queries, block_q), heads, batch), query_side, block_q, block_k),
            (
                flash_key_value_grad_kernel,
                (triton.cdiv(num_keys, block_k), kv_heads, batch),
                key_side,
                block_k,
                block_q,
            ),
        )
        for kernel, grid, arguments, stay, passing in sides:
            launch(kernel, grid, *arguments, **meta, BLOCK_STAY=stay, BLOCK_PASS=passing, num_stages=1)
    return dq, dk, dv


def _check_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, grad_out: Tensor) -> None:
    """Refuse what the forward pass couldn't have given."""
    check_attention(q, k, v)
    check_output("out", out, q)
    check_output("grad_out", grad_out, q)
    check_output("log_sum_exp", log_sum_exp, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
