"""Attention of several new tokens of each request, over keys and values that lie in blocks: prompts, pieces, drafts.

Lab 06 decodes from blocks with one query a sequence, and prefills from keys that lie side by side. A step of the engine
needs both at once, and windows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_alike, check_heads, check_tile, score_scale
from labkit.checks import check_count
from labkit.launch import backend, launch


@triton.jit
def paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    first_ptr,
    count_ptr,
    length_ptr,
    out_ptr,
    q_stride_t,
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
    table_stride_s,
    table_stride_block,
    out_stride_t,
    out_stride_h,
    out_stride_d,
    scale,
    window,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_Q queries of one kv head and one sequence: program (tile, kv head, sequence).

    A tile's rows are pairs of a token and a query head that shares the kv head, so that keys are read once for all
    heads of a group. first, count and length are contiguous.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    count = tl.load(count_ptr + sequence).to(tl.int32)
    if tile * BLOCK_Q >= count * GROUP_SIZE:
        return

    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, BLOCK_D)
    tokens = rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    places = tl.load(first_ptr + sequence).to(tl.int64) + tokens
    row_mask = (tokens < count)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q_ptr + places * q_stride_t + heads * q_stride_h
    q = tl.load(q_rows[:, None] + dims[None, :] * q_stride_d, mask=row_mask, other=0.0)

    # The queries are the last of the sequence's tokens; of its keys none behind the tile's last query is looked at.
    length = tl.load(length_ptr + sequence).to(tl.int32)
    positions = length - count + tokens
    last_token = tl.minimum(((tile + 1) * BLOCK_Q - 1) // GROUP_SIZE, count - 1)
    end = length - count + last_token + 1
    begin = 0
    if WINDOWED:
        first_position = length - count + tile * BLOCK_Q // GROUP_SIZE
        begin = tl.maximum(0, first_position - window + 1) // BLOCK_K * BLOCK_K
    table = table_ptr + sequence * table_stride_s
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        known = cols < end
        if WINDOWED:
            known = known & (cols > first_position - window)
        # What a table holds behind its last token is not a block: it is not even read. Neither is what no query sees.
        block = tl.load(table + cols // BLOCK_SIZE * table_stride_block, mask=known, other=0).to(tl.int64)
        slot = cols % BLOCK_SIZE
        col_mask = known[:, None] & (dims < HEAD_DIM)[None, :]
        k_rows = k_ptr + block * k_stride_block + slot * k_stride_t + kv_head * k_stride_h
        v_rows = v_ptr + block * v_stride_block + slot * v_stride_t + kv_head * v_stride_h
        k = tl.load(k_rows[:, None] + dims[None, :] * k_stride_d, mask=col_mask, other=0.0)
        v = tl.load(v_rows[:, None] + dims[None, :] * v_stride_d, mask=col_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = cols[None, :] <= positions[:, None]
        if WINDOWED:
            visible = visible & (cols[None, :] > positions[:, None] - window)
        scores = tl.where(visible & known[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A window's first tile may hold nothing that the tile's last queries see.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max

    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_rows = out_ptr + places * out_stride_t + heads * out_stride_h
    tl.store(out_rows[:, None] + dims[None, :] * out_stride_d, out.to(out_ptr.dtype.element_ty), mask=row_mask)


def paged_attention_torch(
    q: Tensor, key_blocks: Tensor, value_blocks: Tensor, block_tables: Tensor, firsts: Tensor, counts: Tensor,
    lengths: Tensor, out: Tensor, *, window: int | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The same in plain torch, sequence by sequence. Arguments, result and errors as for `paged_attention`."""
    _check_paged(q, key_blocks, value_blocks, block_tables, firsts, counts, lengths, window)
    factor = score_scale(scale, q.shape[-1])
    block_size, kv_heads = key_blocks.shape[1:3]
    for table, first, count, length in zip(
        block_tables, firsts.tolist(), counts.tolist(), lengths.tolist(), strict=True
    ):
        blocks = table[: -(-length // block_size)]
        # [kv_heads, 1, tokens, head_dim], cut to the sequence before anything is multiplied.
        keys, values = (
            memory[blocks].flatten(0, 1)[:length].float().transpose(0, 1)[:, None]
            for memory in (key_blocks, value_blocks)
        )
        queries = q[first : first + count].float().transpose(0, 1).unflatten(0, (kv_heads, -1))
        positions = torch.arange(length - count, length, device=q.device)[:, None]
        cols = torch.arange(length, device=q.device)
        visible = cols <= positions
        if window is not None:
            visible &= cols > positions - window
        scores = (queries @ keys.transpose(-1, -2) * factor).masked_fill(~visible, -torch.inf)
        # A row that sees nothing weighs NaN, and reads 0.
        read = scores.softmax(-1).masked_fill(~visible, 0.0) @ values
        out[first : first + count] = read.flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out


def paged_attention(
    q: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    block_tables: Tensor,
    firsts: Tensor,
    counts: Tensor,
    lengths: Tensor,
    max_count: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    block_q: int = 64,
    block_k: int = 32,
) -> Tensor:
    """Causal attention of the newest tokens of sequences, over all tokens that their block tables lead to.

    Args:
        q: queries of the whole step, end to end `[tokens, heads, head_dim]`, any strides.
        key_blocks: all blocks of a layer's keys `[num_blocks, block_size, kv_heads, head_dim]`, any strides; query
            head h reads kv head `h // (heads // kv_heads)`.
        value_blocks: same shape, any strides.
        block_tables: int64 `[sequences, max_blocks]`, any strides: the blocks of each sequence in order. What stands
            behind the blocks that its length needs is never read; blocks of nobody may hold anything, NaN too.
        firsts: int64 `[sequences]`: where in `q` the queries of a sequence begin.
        counts: int64 `[sequences]`: how many they are; its newest tokens.
        lengths: int64 `[sequences]`: its tokens, the queries' own included. A query without keys reads 0.
        max_count: the largest of `counts`, or more; it sizes the grid.
        window: newest tokens that a query sees, its own included; None means all.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        out: where to write, of the shape of `q`, any strides; rows of no sequence stay as they are. None takes new
            memory, in which such rows hold anything.
        block_q: rows in a tile, each a token under one of the heads that share a kv head; a power of two from 16.
        block_k: keys in a tile, likewise.

    Returns:
        `out`, in the dtype of `q`.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or a number is not allowed; on a CPU also queries,
            lengths or blocks that aren't there. On a GPU those are the caller's to check: reading them would stop the
            stream.

    Source: Kwon et al. 2023 (2309.06180); Dao 2023 (2307.08691).
    """
    _check_paged(q, key_blocks, value_blocks, block_tables, firsts, counts, lengths, window)
    check_count("max_count", max_count, 1)
    check_tile("block_q", block_q)
    check_tile("block_k", block_k)
    factor = score_scale(scale, q.shape[-1])
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tensors = (q, key_blocks, value_blocks, block_tables, firsts, counts, lengths, out)
    if backend(*tensors) == "twin":
        return paged_attention_torch(*tensors, window=window, scale=scale)
    block_size, kv_heads, head_dim = key_blocks.shape[1:]
    group_size = q.shape[1] // kv_heads
    # A few queries need no tall tile.
    block_q = min(block_q, max(16, triton.next_power_of_2(max_count * group_size)))
    launch(
        paged_attention_kernel,
        (triton.cdiv(max_count * group_size, block_q), kv_heads, len(counts)),
        *(q, key_blocks, value_blocks, block_tables, firsts.contiguous(), counts.contiguous(), lengths.contiguous()),
        out,
        *(*q.stride(), *key_blocks.stride(), *value_blocks.stride(), *block_tables.stride(), *out.stride()),
        *(factor, window or 0),
        BLOCK_SIZE=block_size,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        WINDOWED=window is not None,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_stages=2,
    )
    return out


def _check_paged(
    q: Tensor, key_blocks: Tensor, value_blocks: Tensor, block_tables: Tensor, firsts: Tensor, counts: Tensor,
    lengths: Tensor, window: int | None,
) -> None:  # fmt: skip
    """Refuse what doesn't fit together, before anything is computed."""
    if q.dim() != 3 or key_blocks.dim() != 4 or key_blocks.shape != value_blocks.shape:
        raise ValueError(
            "q must have shape [tokens, heads, head_dim], key_blocks and value_blocks both [num_blocks, block_size, "
            f"kv_heads, head_dim]; got {list(q.shape)}, {list(key_blocks.shape)} and {list(value_blocks.shape)}"
        )
    check_alike(q=q, key_blocks=key_blocks, value_blocks=value_blocks)
    check_heads(q.shape[1], key_blocks.shape[2], q.shape[2], key_blocks.shape[3])
    if window is not None:
        check_count("window", window, 1)
    numbers = (("block_tables", block_tables, 2), ("firsts", firsts, 1), ("counts", counts, 1), ("lengths", lengths, 1))
    for name, tensor, axes in numbers:
        if tensor.dtype != torch.int64 or tensor.dim() != axes or len(tensor) != len(counts):
            raise ValueError(
                f"{name} must be int64 with {axes} axes and a row for each of {len(counts)} sequences, got "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
    if lengths.device.type != "cpu":
        return
    num_blocks, block_size = key_blocks.shape[:2]
    for row, (first, count, length) in enumerate(zip(firsts.tolist(), counts.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= first <= first + count <= len(q):
            raise ValueError(f"sequence {row}: queries {first} to {first + count} of {len(q)} are not there")
        if not 0 <= length <= block_tables.shape[1] * block_size:
            raise ValueError(
                f"sequence {row}: a table of {block_tables.shape[1]} blocks of {block_size} tokens can't hold {length}"
            )
        for block in block_tables[row, : -(-length // block_size)].tolist():
            if not 0 <= block < num_blocks:
                raise ValueError(f"sequence {row}: its table names block {block}; the blocks are 0 to {num_blocks - 1}")
