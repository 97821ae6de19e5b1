"""Tiles dealt out to splits in turn, as cards are; the merge finds the largest log-sum-exp first."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_attention, check_tile, score_scale
from labkit.checks import check_count
from labkit.launch import backend, launch
from labkit.tuning import num_multiprocessors


def choose_num_splits(num_programs: int, num_tiles: int, num_multiprocessors: int) -> int:
    """How many splits keep a GPU busy.

    Args:
        num_programs: programs without splitting: batch · kv_heads.
        num_tiles: key tiles of a sequence.
        num_multiprocessors: programs that run at the same time.

    Returns:
        The smallest number of splits that leaves the longest one as short as any number does that fits one wave, that
        is, with at most `num_multiprocessors` programs in all. At least 1, and no split is empty.

    Raises:
        ValueError: a number is no int of at least 1.
    """
    check_count("num_programs", num_programs, 1)
    check_count("num_tiles", num_tiles, 1)
    check_count("num_multiprocessors", num_multiprocessors, 1)
    fitting = [n for n in range(1, num_tiles + 1) if n == 1 or n * num_programs <= num_multiprocessors]
    return min(fitting, key=lambda n: (-(-num_tiles // n), n))


@triton.jit
def flash_decoding_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    q_stride_b,
    q_stride_h,
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
    num_keys,
    num_splits,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One split of the keys, for all query heads of one kv head: program (split, kv head, batch row).

    The group's queries are the rows of one tile, so each key is loaded once for all of them. The partial output is
    contiguous fp32 [b, h, splits, d], the partial lse [b, h, splits].
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    members = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP_SIZE + members
    inside = (members < GROUP_SIZE)[None, :] & (dims < HEAD_DIM)[:, None]
    q_offsets = batch * q_stride_b + heads[None, :] * q_stride_h + dims[:, None] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=inside, other=0.0)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
    for number in range(split, tl.cdiv(num_keys, BLOCK_K), num_splits):
        cols = number * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
        k_offsets = batch * k_stride_b + kv_head * k_stride_h + cols[:, None] * k_stride_t + dims[None, :] * k_stride_d
        v_offsets = batch * v_stride_b + kv_head * v_stride_h + cols[None, :] * v_stride_t + dims[:, None] * v_stride_d
        there = cols < num_keys
        k = tl.load(k_ptr + k_offsets, mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_ptr + v_offsets, mask=there[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        scores = tl.where(there[:, None], tl.dot(k, q, input_precision="ieee") * scale, float("-inf"))
        risen = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp(scores - risen[None, :])
        shrink = tl.exp(peak - risen)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[None, :] + tl.dot(v, weights.to(v.dtype), input_precision="ieee")
        peak = risen
    places = (batch * tl.num_programs(1) * GROUP_SIZE + heads) * num_splits + split
    seen = total > 0.0
    mean = acc / tl.where(seen, total, 1.0)[None, :]
    tl.store(partial_out_ptr + places[None, :] * HEAD_DIM + dims[:, None], mean, mask=inside)
    lse = tl.where(seen, peak + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(partial_lse_ptr + places, lse, mask=members < GROUP_SIZE)


@triton.jit
def merge_partials_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The whole of one row from its splits: program (row). All tensors are contiguous, rows first."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    largest = float("-inf")
    for split in range(num_splits):
        largest = tl.maximum(largest, tl.load(partial_lse_ptr + row * num_splits + split))
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    total = 0.0
    for split in range(num_splits):
        total += tl.exp(tl.load(partial_lse_ptr + row * num_splits + split) - shift)
    lse = tl.where(total > 0.0, shift + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    out = tl.zeros([BLOCK_D], tl.float32)
    for split in range(num_splits):
        share = tl.exp(tl.load(partial_lse_ptr + row * num_splits + split) - tl.where(total > 0.0, lse, 0.0))
        part = tl.load(partial_out_ptr + (row * num_splits + split) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        out += share * part
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(lse_ptr + row, lse)


def merge_partials_torch(partial_out: Tensor, partial_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in plain torch. Arguments, results and errors as for `merge_partials`."""
    _check_partials(partial_out, partial_lse)
    out, lse = partial_out[:, :, 0], partial_lse[:, :, 0]
    for split in range(1, partial_lse.shape[2]):
        other_out, other_lse = partial_out[:, :, split], partial_lse[:, :, split]
        largest = torch.maximum(lse, other_lse)
        shift = torch.where(largest == -math.inf, 0.0, largest)
        mine, theirs = (lse - shift).exp(), (other_lse - shift).exp()
        total = mine + theirs
        safe = torch.where(total == 0, 1.0, total)[..., None]
        out = (out * mine[..., None] + other_out * theirs[..., None]) / safe
        lse = shift + total.log()
    return out.to(dtype), lse


def flash_decoding_torch(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, num_splits: int = 1, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, split by split. Arguments, results and errors as for `flash_decoding`."""
    _check_decode(q, k, v, num_splits, block_k)
    factor = score_scale(scale, q.shape[-1])
    owner = [head // (q.shape[1] // k.shape[1]) for head in range(q.shape[1])]
    scores = (k[:, owner].float() * q.float().unsqueeze(2)).sum(-1) * factor
    peak = torch.cat([scores, torch.full((*scores.shape[:2], 1), -math.inf)], -1).amax(-1)
    weights = (scores - torch.where(peak == -math.inf, 0.0, peak)[..., None]).exp()
    total = weights.sum(-1)
    out = (weights[..., None] * v[:, owner].float()).sum(2) / torch.where(total == 0, 1.0, total)[..., None]
    return out.to(q.dtype), peak + total.log()


def merge_partials(partial_out: Tensor, partial_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attention over parts of them.

    Args:
        partial_out: fp32 `[batch, heads, splits, head_dim]`: the output of each part, normalised by itself.
        partial_lse: fp32 `[batch, heads, splits]`: its log-sum-exp; a part without keys has output 0 and -inf.
        dtype: of the output.

    Returns:
        The output `[batch, heads, head_dim]` in `dtype`, and the log-sum-exp, fp32 `[batch, heads]`; 0 and -inf where
        no part has a key.

    Raises:
        ValueError: shapes or dtypes don't fit together.
    """
    _check_partials(partial_out, partial_lse)
    if backend(partial_out, partial_lse) == "twin":
        return merge_partials_torch(partial_out, partial_lse, dtype)
    batch, heads, num_splits, head_dim = partial_out.shape
    out = torch.empty((batch, heads, head_dim), dtype=dtype, device=partial_out.device)
    lse = torch.empty((batch, heads), dtype=torch.float32, device=partial_out.device)
    parts = (partial_out.contiguous(), partial_lse.contiguous())
    block_d = max(16, triton.next_power_of_2(head_dim))
    launch(merge_partials_kernel, (batch * heads,), *parts, out, lse, num_splits, HEAD_DIM=head_dim, BLOCK_D=block_d)
    return out, lse


def flash_decoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    num_splits: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one new token per sequence, which sees all keys.

    Args:
        q: queries `[batch, heads, head_dim]`, any strides.
        k: keys `[batch, kv_heads, num_keys, head_dim]`, any strides; query head h reads kv head
            `h // (heads // kv_heads)`.
        v: values, same shape as `k`, any strides.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        num_splits: parts of the keys, each in a program of its own; may exceed the number of tiles. None takes as many
            as the device runs at once.
        block_k: keys in a tile, a power of two from 16; None leaves it to the launcher.

    Returns:
        The output, of q's shape and dtype, and the log-sum-exp of each row's scaled scores, fp32 `[batch, heads]`; 0
        and -inf where there are no keys. The number of splits changes neither beyond rounding.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or a number is not allowed.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    if block_k is None:
        # Twice as many bytes a number, half as many keys: shared memory stays within 99 KiB.
        block_k = 32 if q.dtype == torch.float32 else 64
    if num_splits is None:
        programs, tiles = k.shape[0] * k.shape[1], -(-k.shape[2] // block_k)
        num_splits = choose_num_splits(max(1, programs), max(1, tiles), num_multiprocessors(q.device))
    _check_decode(q, k, v, num_splits, block_k)
    factor = score_scale(scale, q.shape[-1])
    if backend(q, k, v) == "twin":
        return flash_decoding_torch(q, k, v, scale=scale, num_splits=num_splits, block_k=block_k)
    batch, heads, head_dim = q.shape
    kv_heads, num_keys = k.shape[1], k.shape[2]
    group_size = heads // kv_heads
    partial_out = torch.empty((batch, heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((batch, heads, num_splits), dtype=torch.float32, device=q.device)
    launch(
        flash_decoding_kernel,
        (num_splits, kv_heads, batch),
        *(q, k, v, partial_out, partial_lse),
        *(*q.stride(), *k.stride(), *v.stride()),
        *(factor, num_keys, num_splits),
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_G=max(16, triton.next_power_of_2(group_size)),
        BLOCK_K=block_k,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_stages=2,
    )
    return merge_partials(partial_out, partial_lse, q.dtype)


def _check_decode(q: Tensor, k: Tensor, v: Tensor, num_splits: int, block_k: int) -> None:
    """Refuse what doesn't fit together, before anything is computed."""
    if q.dim() != 3:
        raise ValueError(f"q must have 3 axes [batch, heads, head_dim], got shape {list(q.shape)}")
    check_attention(q.unsqueeze(2), k, v)
    check_count("num_splits", num_splits, 1)
    check_tile("block_k", block_k)


def _check_partials(partial_out: Tensor, partial_lse: Tensor) -> None:
    """Refuse partial results that don't belong together."""
    if partial_out.dim() != 4 or partial_out.shape[:3] != partial_lse.shape or partial_out.shape[2] < 1:
        raise ValueError(
            "partial_out must have shape [batch, heads, splits, head_dim] with at least one split, and partial_lse "
            f"[batch, heads, splits]; got {list(partial_out.shape)} and {list(partial_lse.shape)}"
        )
    if partial_out.dtype != torch.float32 or partial_lse.dtype != torch.float32:
        raise ValueError(f"partial results must be in fp32, got {partial_out.dtype} and {partial_lse.dtype}")
