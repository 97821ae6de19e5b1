"""One key at a time, without matrix products: slow, and as right as any tile."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_alike, check_heads, check_tile, score_scale
from labkit.checks import check_count
from labkit.launch import backend, launch
from labkit.tuning import num_multiprocessors

from .flash_decoding import choose_num_splits, merge_partials


@triton.jit
def paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_d,
    k_stride_block,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    v_stride_block,
    v_stride_t,
    v_stride_h,
    v_stride_d,
    table_stride_b,
    table_stride_block,
    scale,
    num_splits,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One split of one sequence's keys, for all query heads of one kv head: program (split, kv head, batch row).

    length is contiguous [b]; the partial output is contiguous fp32 [b, h, splits, d], the partial lse [b, h, splits].
    BLOCK_SIZE tokens lie in a block of memory; BLOCK_K keys are in a tile.
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    members = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP_SIZE + members
    inside = (members < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_offsets, mask=inside, other=0.0).to(tl.float32)
    length = tl.load(length_ptr + batch)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for position in range(length * split // num_splits, length * (split + 1) // num_splits):
        block = tl.load(table_ptr + batch * table_stride_b + position // BLOCK_SIZE * table_stride_block).to(tl.int64)
        k_start = k_ptr + block * k_stride_block + position % BLOCK_SIZE * k_stride_t + kv_head * k_stride_h
        v_start = v_ptr + block * v_stride_block + position % BLOCK_SIZE * v_stride_t + kv_head * v_stride_h
        k = tl.load(k_start + dims * k_stride_d, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        v = tl.load(v_start + dims * v_stride_d, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        scores = tl.sum(q * k[None, :], 1) * scale
        risen = tl.maximum(peak, scores)
        weights = tl.exp(scores - risen)
        shrink = tl.exp(peak - risen)
        total = total * shrink + weights
        acc = acc * shrink[:, None] + weights[:, None] * v[None, :]
        peak = risen
    places = (batch * tl.num_programs(1) * GROUP_SIZE + heads) * num_splits + split
    seen = total > 0.0
    lse = tl.where(seen, peak + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    mean = acc / tl.where(seen, total, 1.0)[:, None]
    tl.store(partial_out_ptr + places[:, None] * HEAD_DIM + dims[None, :], mean, mask=inside)
    tl.store(partial_lse_ptr + places, lse, mask=members < GROUP_SIZE)


def paged_decode_torch(
    q: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, sequence by sequence. Arguments, results and errors as for `paged_decode`."""
    _check_paged(q, key_blocks, value_blocks, block_tables, lengths)
    factor = score_scale(scale, q.shape[-1])
    heads, block_size = q.shape[1], key_blocks.shape[1]
    owner = [head // (heads // key_blocks.shape[2]) for head in range(heads)]
    out = torch.zeros(q.shape)
    log_sum_exp = torch.full(q.shape[:2], -math.inf)
    for row in range(len(q)):
        for position in range(int(lengths[row])):
            place = int(block_tables[row, position // block_size]), position % block_size
            scores = (q[row].float() * key_blocks[place][owner].float()).sum(-1) * factor
            largest = torch.maximum(log_sum_exp[row], scores)
            total = largest + ((log_sum_exp[row] - largest).exp() + (scores - largest).exp()).log()
            old, new = (log_sum_exp[row] - total).exp(), (scores - total).exp()
            out[row] = old[:, None] * out[row] + new[:, None] * value_blocks[place][owner].float()
            log_sum_exp[row] = total
    return out.to(q.dtype), log_sum_exp


def paged_decode(
    q: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    num_splits: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one new token per sequence over the tokens that its block table leads to.

    Args:
        q: queries `[batch, heads, head_dim]`, any strides.
        key_blocks: all blocks of a layer's keys `[num_blocks, block_size, kv_heads, head_dim]`, any strides; query
            head h reads kv head `h // (heads // kv_heads)`.
        value_blocks: same shape, any strides.
        block_tables: int32 or int64 `[batch, max_blocks]`, any strides: the blocks of each sequence in order. What
            stands behind the blocks that its length needs is never read; blocks of nobody may hold anything, NaN too.
        lengths: int32 or int64 `[batch]`: tokens of each sequence, 0 to max_blocks · block_size.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        num_splits: parts of each sequence; more than one are merged by task 8's `merge_partials`. None takes as many as
            the device runs at once.
        block_k: keys in a tile, a power of two from 16; None leaves it to the launcher.

    Returns:
        The output, of q's shape and dtype, and the log-sum-exp of each row's scaled scores, fp32 `[batch, heads]`; 0
        and -inf for a sequence of length 0.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or a number is not allowed; on a CPU also a length or
            a block that isn't there. On a GPU those two are the caller's to check: reading them would stop the stream.

    Source: Kwon et al. 2023 (2309.06180).
    """
    _check_paged(q, key_blocks, value_blocks, block_tables, lengths)
    if block_k is None:
        block_k = 32 if q.dtype == torch.float32 else 64
    check_tile("block_k", block_k)
    batch, heads, head_dim = q.shape
    block_size, kv_heads = key_blocks.shape[1], key_blocks.shape[2]
    if num_splits is None:
        tiles = -(-block_tables.shape[1] * block_size // block_k)
        num_splits = choose_num_splits(max(1, batch * kv_heads), max(1, tiles), num_multiprocessors(q.device))
    check_count("num_splits", num_splits, 1)
    factor = score_scale(scale, head_dim)
    if backend(q, key_blocks, value_blocks, block_tables, lengths) == "twin":
        return paged_decode_torch(q, key_blocks, value_blocks, block_tables, lengths, scale=scale)
    group_size = heads // kv_heads
    partial_out = torch.empty((batch, heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((batch, heads, num_splits), dtype=torch.float32, device=q.device)
    launch(
        paged_decode_kernel,
        (num_splits, kv_heads, batch),
        *(q, key_blocks, value_blocks, block_tables, lengths.contiguous(), partial_out, partial_lse),
        *(*q.stride(), *key_blocks.stride(), *value_blocks.stride(), *block_tables.stride()),
        *(factor, num_splits),
        BLOCK_SIZE=block_size,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_G=max(16, triton.next_power_of_2(group_size)),
        BLOCK_K=block_k,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_stages=2,
    )
    if num_splits == 1:
        return partial_out[:, :, 0].to(q.dtype), partial_lse[:, :, 0]
    return merge_partials(partial_out, partial_lse, q.dtype)


def _check_paged(q: Tensor, key_blocks: Tensor, value_blocks: Tensor, block_tables: Tensor, lengths: Tensor) -> None:
    """Refuse what doesn't fit together, before anything is computed."""
    if q.dim() != 3 or key_blocks.dim() != 4 or key_blocks.shape != value_blocks.shape:
        raise ValueError(
            "q must have shape [batch, heads, head_dim], key_blocks and value_blocks both [num_blocks, block_size, "
            f"kv_heads, head_dim]; got {list(q.shape)}, {list(key_blocks.shape)} and {list(value_blocks.shape)}"
        )
    check_alike(q=q, key_blocks=key_blocks, value_blocks=value_blocks)
    check_heads(q.shape[1], key_blocks.shape[2], q.shape[2], key_blocks.shape[3])
    check_count("block_size", key_blocks.shape[1], 1)
    for name, tensor, axes in (("block_tables", block_tables, 2), ("lengths", lengths, 1)):
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != axes or len(tensor) != len(q):
            raise ValueError(
                f"{name} must be int32 or int64 with {axes} axes and one row for each of {len(q)} queries, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
    if lengths.device.type != "cpu":
        return
    num_blocks, block_size = key_blocks.shape[:2]
    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length <= block_tables.shape[1] * block_size:
            raise ValueError(
                f"row {row}: a table of {block_tables.shape[1]} blocks of {block_size} tokens can't hold {length}"
            )
        for block in block_tables[row, : -(-length // block_size)].tolist():
            if not 0 <= block < num_blocks:
                raise ValueError(f"row {row}: its table names block {block}; the blocks are 0 to {num_blocks - 1}")
