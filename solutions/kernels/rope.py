"""Task 4: rotary position embedding of queries and keys, both in one kernel."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_alike, check_output
from labkit.checks import check_count
from labkit.launch import backend, launch
from labkit.row_checks import check_axes, check_power_of_two

MAX_BLOCK_TOKENS = 128


def rope_tables(num_positions: int, head_dim: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every angle that RoPE needs: position · theta^(−2i / head_dim).

    Angles are computed in float64: at position 100,000, fp32 would be off by several thousandths of a radian.

    Args:
        num_positions: positions 0 to num_positions − 1.
        head_dim: even; pair i, of channels i and i + head_dim / 2, turns at frequency theta^(−2i / head_dim).
        theta: base of the frequencies.

    Returns:
        cos and sin, fp32 `[num_positions, head_dim / 2]`.

    Raises:
        ValueError: a count is below 1, head_dim is odd, or theta is not above 0.
    """
    check_count("num_positions", num_positions, 1)
    check_count("head_dim", head_dim, 2)
    if head_dim % 2 or not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"head_dim must be even and theta a number above 0, got {head_dim} and {theta!r}")
    # BEGIN SOLUTION
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    frequencies = theta ** (-2 * pairs / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return angles.cos().float(), angles.sin().float()
    # END SOLUTION


@triton.jit
def rotate_heads(
    x_ptr,
    out_ptr,
    x_stride_head,
    x_stride_token,
    x_stride_dim,
    out_stride_head,
    out_stride_token,
    out_stride_dim,
    num_heads,
    tokens,
    pairs,
    cos,
    sin,
    mask,
    HALF: tl.constexpr,
):
    """Turns a tile of tokens of every head by the same angles.

    Args:
        x_ptr, out_ptr: at head 0 and token 0 of the right batch row.
        tokens: `[BLOCK_TOKENS]` numbers of the tile's tokens.
        pairs: `[BLOCK_HALF]` numbers of the channel pairs.
        cos, sin, mask: `[BLOCK_TOKENS, BLOCK_HALF]`; mask is True where token and pair exist.
    """
    # BEGIN SOLUTION
    x_tile = x_ptr + tokens[:, None] * x_stride_token + pairs[None, :] * x_stride_dim
    out_tile = out_ptr + tokens[:, None] * out_stride_token + pairs[None, :] * out_stride_dim
    for head in range(num_heads):
        x_head = x_tile + tl.cast(head, tl.int64) * x_stride_head
        out_head = out_tile + tl.cast(head, tl.int64) * out_stride_head
        # Both halves are here before either is written, so that the output may lie on the input.
        first = tl.load(x_head, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_head + HALF * x_stride_dim, mask=mask, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        tl.store(out_head, turned.to(out_ptr.dtype.element_ty), mask=mask)
        turned = second * cos + first * sin
        tl.store(out_head + HALF * out_stride_dim, turned.to(out_ptr.dtype.element_ty), mask=mask)
    # END SOLUTION


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_out_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    q_stride_d,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    k_stride_d,
    cos_stride_position,
    cos_stride_pair,
    sin_stride_position,
    sin_stride_pair,
    positions_stride_b,
    positions_stride_t,
    q_out_stride_b,
    q_out_stride_h,
    q_out_stride_t,
    q_out_stride_d,
    k_out_stride_b,
    k_out_stride_h,
    k_out_stride_t,
    k_out_stride_d,
    num_heads,
    num_kv_heads,
    num_tokens,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """BLOCK_TOKENS tokens of all heads of q and k: program (tile of tokens, batch row). HALF = head_dim / 2."""
    batch = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    pairs = tl.arange(0, BLOCK_HALF).to(tl.int64)
    # BEGIN SOLUTION
    mask = (tokens < num_tokens)[:, None] & (pairs < HALF)[None, :]
    positions_row = positions_ptr + batch * positions_stride_b
    positions = tl.load(positions_row + tokens * positions_stride_t, mask=tokens < num_tokens, other=0).to(tl.int64)
    # One look at the tables serves all heads.
    cos_tile = cos_ptr + positions[:, None] * cos_stride_position + pairs[None, :] * cos_stride_pair
    sin_tile = sin_ptr + positions[:, None] * sin_stride_position + pairs[None, :] * sin_stride_pair
    cos = tl.load(cos_tile, mask=mask, other=0.0)
    sin = tl.load(sin_tile, mask=mask, other=0.0)
    rotate_heads(
        q_ptr + batch * q_stride_b, q_out_ptr + batch * q_out_stride_b, q_stride_h, q_stride_t, q_stride_d,
        q_out_stride_h, q_out_stride_t, q_out_stride_d, num_heads, tokens, pairs, cos, sin, mask, HALF,
    )  # fmt: skip
    rotate_heads(
        k_ptr + batch * k_stride_b, k_out_ptr + batch * k_out_stride_b, k_stride_h, k_stride_t, k_stride_d,
        k_out_stride_h, k_out_stride_t, k_out_stride_d, num_kv_heads, tokens, pairs, cos, sin, mask, HALF,
    )  # fmt: skip
    # END SOLUTION


def apply_rope_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The same computation in plain torch.

    Arguments, results and errors as for `apply_rope`.
    """
    _check_rope(q, k, cos, sin, positions)
    # BEGIN SOLUTION
    # [batch, tokens, pairs] gets an axis for the heads, which all turn by the same angles.
    turn_cos, turn_sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    results = []
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat([first * turn_cos - second * turn_sin, second * turn_cos + first * turn_sin], dim=-1)
        results.append(turned.to(x.dtype))
    return results[0], results[1]
    # END SOLUTION


def apply_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    block_tokens: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn each pair of channels of q and k by the angle of its token's position, as Llama does.

    Pair i holds channels i and i + head_dim / 2, the two halves of a head: (a, b) becomes
    (a·cos − b·sin, b·cos + a·sin), in fp32 and rounded once.

    Args:
        q: queries `[batch, heads, tokens, head_dim]` in fp32, fp16 or bf16, any strides.
        k: keys `[batch, kv_heads, tokens, head_dim]`, likewise.
        cos: fp32 `[num_positions, head_dim / 2]`, of `rope_tables` or of a model's own scaling.
        sin: likewise.
        positions: of each token, int64 or int32 `[batch, tokens]`, each below num_positions.
        block_tokens: tokens in a tile, a power of two up to 128; None takes 16.
        out: where to write the results, any strides; None takes new memory. They may be q and k themselves.

    Returns:
        q and k turned, of their shapes and dtype.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, head_dim is odd, or the tables have no such position.
            (Positions on a GPU are not looked at: that would wait for it.)

    Source: Su et al. 2021 (2104.09864).
    """
    _check_rope(q, k, cos, sin, positions)
    block_tokens = 16 if block_tokens is None else block_tokens
    check_power_of_two("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS)
    q_out, k_out = out or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    check_output("out[0]", q_out, q)
    check_output("out[1]", k_out, k)
    if q.numel() == 0:
        return q_out, k_out
    tensors = (q, k, cos, sin, positions, q_out, k_out)
    if backend(*tensors) == "twin":
        results = apply_rope_torch(q, k, cos, sin, positions)
        return q_out.copy_(results[0]), k_out.copy_(results[1])
    batch, heads, num_tokens, head_dim = q.shape
    launch(
        *(rope_kernel, (triton.cdiv(num_tokens, block_tokens), batch), *tensors),
        *(stride for tensor in tensors for stride in tensor.stride()),
        *(heads, k.shape[1], num_tokens),
        HALF=head_dim // 2,
        BLOCK_TOKENS=block_tokens,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
    )
    return q_out, k_out


def _check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Refuse tensors that don't fit together, and on a CPU positions outside the tables."""
    for name, tensor, heads in (("q", q, "heads"), ("k", k, "kv_heads")):
        check_axes(name, tensor, "batch", heads, "tokens", "head_dim")
    check_alike(q=q, k=k)
    batch, _, num_tokens, head_dim = q.shape
    if k.shape[0] != batch or k.shape[2:] != q.shape[2:]:
        raise ValueError(f"q and k may differ in heads only, got shapes {list(q.shape)} and {list(k.shape)}")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, since channels turn in pairs, got {head_dim}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_axes(name, table, "num_positions", "head_dim / 2")
        if table.dtype != torch.float32 or table.shape != cos.shape or table.shape[1] != head_dim // 2:
            raise ValueError(
                f"{name} must be fp32 [num_positions, {head_dim // 2}], like its twin; got {table.dtype} "
                f"{list(table.shape)}"
            )
    if positions.shape != (batch, num_tokens) or positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"positions must be int64 or int32 [{batch}, {num_tokens}], got {positions.dtype} {list(positions.shape)}"
        )
    backend(q, k, cos, sin, positions)
    if positions.device.type == "cpu" and positions.numel():
        lowest, highest = int(positions.min()), int(positions.max())
        if lowest < 0 or highest >= cos.shape[0]:
            raise ValueError(f"positions must be 0 to {cos.shape[0] - 1}, as the tables are, got {lowest} to {highest}")
