"""Task 8: FlashDecoding. One query token per sequence, whose keys are split among programs and merged again."""

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
    # BEGIN SOLUTION
    one_wave = max(1, num_multiprocessors // num_programs)
    tiles_per_split = -(-num_tiles // one_wave)
    return -(-num_tiles // tiles_per_split)
    # END SOLUTION


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
    # BEGIN SOLUTION
    heads = kv_head * GROUP_SIZE + members
    row_mask = (members < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q_ptr + batch * q_stride_b + heads[:, None] * q_stride_h
    q = tl.load(q_rows + dims[None, :] * q_stride_d, mask=row_mask, other=0.0)
    k_head = k_ptr + batch * k_stride_b + kv_head * k_stride_h
    v_head = v_ptr + batch * v_stride_b + kv_head * v_stride_h

    # Whole tiles to each split; the last ones may get a part of a tile, or nothing.
    keys_per_split = tl.cdiv(tl.cdiv(num_keys, BLOCK_K), num_splits) * BLOCK_K
    first = split * keys_per_split
    end = tl.minimum(first + keys_per_split, num_keys)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        col_mask = (cols < end)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_head + cols[:, None] * k_stride_t + dims[None, :] * k_stride_d, mask=col_mask, other=0.0)
        v = tl.load(v_head + cols[:, None] * v_stride_t + dims[None, :] * v_stride_d, mask=col_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((cols < end)[None, :], scores, float("-inf"))
        # Every tile of a split holds a key, so that its maximum is finite.
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(divisor))
    partial = (batch * tl.num_programs(1) * GROUP_SIZE + heads) * num_splits + split
    tl.store(partial_out_ptr + partial[:, None] * HEAD_DIM + dims[None, :], acc / divisor[:, None], mask=row_mask)
    tl.store(partial_lse_ptr + partial, lse, mask=members < GROUP_SIZE)
    # END SOLUTION


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
    # BEGIN SOLUTION
    running_max = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in range(num_splits):
        partial = row * num_splits + split
        part_lse = tl.load(partial_lse_ptr + partial)
        part = tl.load(partial_out_ptr + partial * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        new_max = tl.maximum(running_max, part_lse)
        # As long as all splits were empty, the maximum is -inf.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp(running_max - shift)
        weight = tl.exp(part_lse - shift)
        total = total * rescale + weight
        acc = acc * rescale + weight * part
        running_max = new_max
    divisor = tl.where(total == 0.0, 1.0, total)
    out = acc / divisor
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(lse_ptr + row, tl.where(total == 0.0, float("-inf"), running_max + tl.log(divisor)))
    # END SOLUTION


def merge_partials_torch(partial_out: Tensor, partial_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in plain torch. Arguments, results and errors as for `merge_partials`."""
    _check_partials(partial_out, partial_lse)
    # BEGIN SOLUTION
    peak = partial_lse.amax(-1, keepdim=True)
    # Where every split is empty, -inf - (-inf) would be NaN; with 0 in its place all weights are exp(-inf) = 0.
    weights = (partial_lse - peak.masked_fill(peak == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights[..., None] * partial_out).sum(-2) / total.masked_fill(total == 0, 1.0)
    return out.to(dtype), (peak + total.log()).squeeze(-1)
    # END SOLUTION


def flash_decoding_torch(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, num_splits: int = 1, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, split by split. Arguments, results and errors as for `flash_decoding`."""
    _check_decode(q, k, v, num_splits, block_k)
    factor = score_scale(scale, q.shape[-1])
    # BEGIN SOLUTION
    (batch, heads, head_dim), (_, kv_heads, num_keys, _) = q.shape, k.shape
    grouped = q.float().reshape(batch, kv_heads, heads // kv_heads, head_dim)
    keys_per_split = triton.cdiv(triton.cdiv(num_keys, block_k), num_splits) * block_k
    outs, lses = [], []
    for split in range(num_splits):
        part = slice(split * keys_per_split, (split + 1) * keys_per_split)
        scores = grouped @ k[:, :, part].float().transpose(-1, -2) * factor
        # A slice behind the end is empty. The column of -inf gives even that a maximum.
        peak = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(-1, keepdim=True)
        weights = (scores - peak.masked_fill(peak == -math.inf, 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        out = weights @ v[:, :, part].float() / total.masked_fill(total == 0, 1.0)
        outs.append(out.reshape(batch, heads, head_dim))
        lses.append((peak + total.log()).reshape(batch, heads))
    return merge_partials_torch(torch.stack(outs, 2), torch.stack(lses, 2), q.dtype)
    # END SOLUTION


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
