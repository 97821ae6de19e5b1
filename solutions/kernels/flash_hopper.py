"""FlashAttention's forward pass for Hopper cards: tiles are fetched by the TMA unit, by warps that do nothing else.

Not graded, and not needed: `flash_forward` runs everywhere. What differs is how tiles reach the matrix units, which is
FlashAttention-3's first idea. A *tensor map* (descriptor) knows a tensor's shape and strides, so that one instruction
fetches a tile, with zeros beyond the ends, where the plain kernel computes an address and a mask for each element. With
*warp specialization* producer warps issue these fetches while consumer warps multiply.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_attention, score_scale
from labkit.launch import launch

from .flash_forward import flash_attention_forward

HOPPER = 9
"""Major compute capability. Consumer Blackwell (12) has the TMA, but not Hopper's matrix instructions."""
ALIGNMENT = 16
"""Bytes; what a tensor map demands of the address and of every stride but the last."""
BLOCK_Q, BLOCK_K = 128, 64


@triton.jit
def flash_hopper_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    v_stride_t,
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
    """One tile of BLOCK_Q queries of one head: program (tile, head, batch row); see `flash_forward_kernel`.

    Channels lie side by side. out is contiguous [b, h, t, d], lse [b, h, t].
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    kv_head = head // group_size
    row = (batch * tl.num_programs(1) + head) * num_queries
    # One map per head: a tile that reaches over the last token meets zeros, not the next head.
    q_map = tl.make_tensor_descriptor(
        q_ptr + batch * q_stride_b + head * q_stride_h, [num_queries, HEAD_DIM], [q_stride_t, 1], [BLOCK_Q, BLOCK_D]
    )
    k_map = tl.make_tensor_descriptor(
        k_ptr + batch * k_stride_b + kv_head * k_stride_h, [num_keys, HEAD_DIM], [k_stride_t, 1], [BLOCK_K, BLOCK_D]
    )
    v_map = tl.make_tensor_descriptor(
        v_ptr + batch * v_stride_b + kv_head * v_stride_h, [num_keys, HEAD_DIM], [v_stride_t, 1], [BLOCK_K, BLOCK_D]
    )
    out_map = tl.make_tensor_descriptor(
        out_ptr + row * HEAD_DIM, [num_queries, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_Q, BLOCK_D]
    )
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = q_map.load([tile * BLOCK_Q, 0])
    offset = num_keys - num_queries
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, tl.minimum((tile + 1) * BLOCK_Q, num_queries) + offset)

    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in tl.range(0, end, BLOCK_K, warp_specialize=True):
        k = k_map.load([start, 0])
        v = v_map.load([start, 0])
        scores = tl.dot(q, tl.trans(k)) * scale
        cols = start + tl.arange(0, BLOCK_K)
        # Zeros fill a tile beyond the last key, and a score of 0 would count.
        visible = (cols < num_keys)[None, :]
        if CAUSAL:
            visible = visible & (cols[None, :] <= rows[:, None] + offset)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    # Rows beyond the last query lie outside of the map, and are not stored.
    out_map.store([tile * BLOCK_Q, 0], (acc / divisor[:, None]).to(q.dtype))
    lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(divisor))
    tl.store(lse_ptr + row + rows, lse, mask=rows < num_queries)


def suits_hopper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether tensors lie on a Hopper card, in 16 bits and in a layout that tensor maps can describe."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != HOPPER:
        return False
    return is_mappable(q, k, v)


def is_mappable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether tensor maps can describe the three: 16-bit, not empty, aligned, with channels side by side."""
    tensors = (q, k, v)
    per_alignment = ALIGNMENT // 2
    return all(
        tensor.element_size() == 2
        and tensor.numel() > 0
        and tensor.shape[-1] % per_alignment == 0
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % ALIGNMENT == 0
        and all(stride % per_alignment == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def fastest_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`flash_attention_forward`, by this kernel where the card and the tensors suit it.

    Arguments, results and errors as there.
    """
    check_attention(q, k, v)
    if not suits_hopper(q, k, v):
        return flash_attention_forward(q, k, v, causal=causal, scale=scale)
    batch, heads, num_queries, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    log_sum_exp = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=q.device)
    # Programs write their maps to memory that Triton asks for at the launch.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=q.device))
    launch(
        flash_hopper_kernel,
        (triton.cdiv(num_queries, BLOCK_Q), heads, batch),
        *(q, k, v, out, log_sum_exp),
        *(*q.stride()[:-1], *k.stride()[:-1], *v.stride()[:-1]),
        *(score_scale(scale, head_dim), num_queries, k.shape[2], heads // k.shape[1]),
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        # Warps of one consumer group; the compiler adds a second group and the producer's.
        num_warps=4,
        num_stages=2,
    )
    return out, log_sum_exp
