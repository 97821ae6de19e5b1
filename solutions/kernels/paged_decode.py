"""Task 9: decode attention over keys and values that lie in blocks anywhere in memory."""

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
    # BEGIN SOLUTION
    heads = kv_head * GROUP_SIZE + members
    row_mask = (members < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q_ptr + batch * q_stride_b + heads[:, None] * q_stride_h
    q = tl.load(q_rows + dims[None, :] * q_stride_d, mask=row_mask, other=0.0)

    # Each sequence is split by its own length.
    length = tl.load(length_ptr + batch).to(tl.int32)
    keys_per_split = tl.cdiv(tl.cdiv(length, BLOCK_K), num_splits) * BLOCK_K
    first = split * keys_per_split
    end = tl.minimum(first + keys_per_split, length)
    table = table_ptr + batch * table_stride_b
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_K):
        positions = start + tl.arange(0, BLOCK_K)
        known = positions < end
        # What the table holds behind the last token is not a block: it is not even read.
        block = tl.load(table + positions // BLOCK_SIZE * table_stride_block, mask=known, other=0).to(tl.int64)
        slot = positions % BLOCK_SIZE
        col_mask = known[:, None] & (dims < HEAD_DIM)[None, :]
        k_rows = k_ptr + block * k_stride_block + slot * k_stride_t + kv_head * k_stride_h
        v_rows = v_ptr + block * v_stride_block + slot * v_stride_t + kv_head * v_stride_h
        k = tl.load(k_rows[:, None] + dims[None, :] * k_stride_d, mask=col_mask, other=0.0)
        v = tl.load(v_rows[:, None] + dims[None, :] * v_stride_d, mask=col_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
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
    # BEGIN SOLUTION
    (batch, heads, head_dim), (_, block_size, kv_heads, _) = q.shape, key_blocks.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    log_sum_exp = torch.empty((batch, heads), dtype=torch.float32, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        blocks = block_tables[row, : -(-length // block_size)].long()
        # [tokens, kv_heads, head_dim], cut to the sequence before anything is multiplied.
        keys, values = (memory[blocks].flatten(0, 1)[:length].float() for memory in (key_blocks, value_blocks))
        queries = q[row].float().reshape(kv_heads, heads // kv_heads, head_dim)
        scores = queries @ keys.permute(1, 2, 0) * factor
        # Of a sequence without tokens the column of -inf is all there is.
        peak = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(-1, keepdim=True)
        weights = (scores - peak.masked_fill(peak == -math.inf, 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        mean = weights @ values.transpose(0, 1) / total.masked_fill(total == 0, 1.0)
        out[row] = mean.reshape(heads, head_dim).to(q.dtype)
        log_sum_exp[row] = (peak + total.log()).flatten()
    return out, log_sum_exp
    # END SOLUTION


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
    for row, count in enumerate(lengths.tolist()):
        if not 0 <= count <= block_tables.shape[1] * block_size:
            raise ValueError(
                f"row {row}: a table of {block_tables.shape[1]} blocks of {block_size} tokens can't hold {count}"
            )
        for block in block_tables[row, : -(-count // block_size)].tolist():
            if not 0 <= block < num_blocks:
                raise ValueError(f"row {row}: its table names block {block}; the blocks are 0 to {num_blocks - 1}")
