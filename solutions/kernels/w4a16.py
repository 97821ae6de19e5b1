"""Task 10: a matrix product with 4-bit weights, which are unpacked in registers and never written out.

A weight row of `in_features` numbers is stored in `in_features / 2` bytes: byte j holds column 2j in its low four bits
and column 2j + 1 in its high four. Each `group_size` consecutive columns of a row share a scale s and, where there are
zero points, a z:

    with zero points      w = s · (c − z)     c and z from 0 to 15
    without, symmetric    w = s · c           c from −8 to 7, as a two's complement of four bits

At group size 128 and 16-bit scales that is 4 + 16/128 = 4.125 bits per weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import DTYPES, check_output
from labkit.launch import backend, launch
from labkit.row_checks import check_axes, check_power_of_two

GROUP_SIZES = (32, 64, 128)


def pack_int4(codes: Tensor) -> Tensor:
    """Two codes a byte, the even column in the low four bits.

    Args:
        codes: whole numbers `[out_features, in_features]`, all from 0 to 15 or all from −8 to 7.

    Returns:
        uint8 `[out_features, in_features / 2]`.

    Raises:
        ValueError: not two axes, an odd number of columns, no whole numbers, or numbers that four bits don't hold.
    """
    check_axes("codes", codes, "out_features", "in_features")
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(f"codes must be whole numbers, got {codes.dtype}")
    if codes.shape[1] % 2:
        raise ValueError(f"two codes share a byte: in_features must be even, got {codes.shape[1]}")
    if codes.numel():
        lowest, highest = int(codes.min()), int(codes.max())
        if (lowest < 0 or highest > 15) and (lowest < -8 or highest > 7):
            raise ValueError(f"codes must all be 0 to 15 or all -8 to 7, got {lowest} to {highest}")
    # BEGIN SOLUTION
    nibbles = codes.to(torch.int32) & 0xF
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).to(torch.uint8)
    # END SOLUTION


def dequantize_int4(packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> Tensor:
    """The weights that packed codes stand for.

    Args:
        packed: uint8 `[out_features, in_features / 2]`.
        scales: floating point `[out_features, in_features / group_size]`.
        zeros: uint8 of the shape of `scales`, from 0 to 15; None means symmetric.
        group_size: 32, 64 or 128 columns.

    Returns:
        fp32 `[out_features, in_features]`.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or the group size doesn't divide in_features.
    """
    _check_packed(packed, scales, zeros, group_size)
    # BEGIN SOLUTION
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=2).flatten(1).to(torch.int32)
    if zeros is None:
        codes = torch.where(nibbles >= 8, nibbles - 16, nibbles)
    else:
        codes = nibbles - zeros.to(torch.int32).repeat_interleave(group_size, dim=1)
    return codes.float() * scales.float().repeat_interleave(group_size, dim=1)
    # END SOLUTION


@triton.jit
def w4a16_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    x_stride_m,
    x_stride_k,
    packed_stride_n,
    packed_stride_byte,
    scales_stride_n,
    scales_stride_group,
    zeros_stride_n,
    zeros_stride_group,
    out_stride_m,
    out_stride_n,
    num_rows,
    out_features,
    in_features,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows of x times BLOCK_N rows of weights: program (tile of n, tile of m). BLOCK_K divides GROUP_SIZE."""
    outs = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # BEGIN SOLUTION
    row_mask, out_mask = rows < num_rows, outs < out_features
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K).to(tl.int64)
        pairs = start // 2 + tl.arange(0, BLOCK_K // 2).to(tl.int64)
        x_tile = x_ptr + rows[:, None] * x_stride_m + columns[None, :] * x_stride_k
        x = tl.load(x_tile, mask=row_mask[:, None], other=0.0)
        packed_tile = packed_ptr + outs[:, None] * packed_stride_n + pairs[None, :] * packed_stride_byte
        packed = tl.load(packed_tile, mask=out_mask[:, None], other=0)
        codes = tl.interleave(packed & 0xF, packed >> 4).to(tl.int32)
        # A tile of columns lies within one group, so that a row has one scale here.
        group = start // GROUP_SIZE
        scale = tl.load(scales_ptr + outs * scales_stride_n + group * scales_stride_group, mask=out_mask, other=0.0)
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + outs * zeros_stride_n + group * zeros_stride_group, mask=out_mask, other=0)
            codes = codes - zero.to(tl.int32)[:, None]
        else:
            codes = tl.where(codes >= 8, codes - 16, codes)
        # The whole numbers are exact in half precision; the scale is applied to their fp32 product.
        product = tl.dot(x, tl.trans(codes.to(x.dtype)), input_precision="ieee")
        acc += product * scale.to(tl.float32)[None, :]
    out_tile = out_ptr + rows[:, None] * out_stride_m + outs[None, :] * out_stride_n
    tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & out_mask[None, :])
    # END SOLUTION


def w4a16_matmul_torch(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> Tensor:
    """The same product in plain torch, which writes the weights out first.

    Arguments, result and errors as for `w4a16_matmul`.
    """
    _check_product(x, packed, scales, zeros, group_size)
    # BEGIN SOLUTION
    return (x.float() @ dequantize_int4(packed, scales, zeros, group_size).T).to(x.dtype)
    # END SOLUTION


def w4a16_matmul(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    *,
    block_m: int = 16,
    block_n: int = 64,
    block_k: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x · Wᵀ with 4-bit weights W, summed in fp32 and rounded once.

    Args:
        x: activations `[rows, in_features]` in fp32, fp16 or bf16, any strides.
        packed: uint8 `[out_features, in_features / 2]`, of `pack_int4`, any strides.
        scales: floating point `[out_features, in_features / group_size]`, any strides.
        zeros: uint8 of that shape; None means symmetric.
        group_size: 32, 64 or 128 columns.
        block_m: rows in a tile, a power of two from 16 to 128. Every tile of rows reads the packed weights once.
        block_n: weight rows in a tile, a power of two from 16 to 256. Every tile of them reads x once.
        block_k: columns in a tile, a power of two from 32 to the group size; None takes a group.
        out: where to write, any strides; None takes new memory.

    Returns:
        `[rows, out_features]` in the dtype of x.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, the group size doesn't divide in_features, or a tile
            size is not allowed.
    """
    _check_product(x, packed, scales, zeros, group_size)
    check_power_of_two("block_m", block_m, 16, 128)
    check_power_of_two("block_n", block_n, 16, 256)
    block_k = group_size if block_k is None else block_k
    check_power_of_two("block_k", block_k, 32, group_size)
    rows, out_features = x.shape[0], packed.shape[0]
    if out is None:
        out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    check_output("out", out, x.new_empty(()).expand(rows, out_features))
    if out.numel() == 0:
        return out
    # A kernel wants a pointer even where it reads nothing through it.
    zeros_or_any = packed if zeros is None else zeros
    if backend(x, packed, scales, zeros_or_any, out) == "twin":
        return out.copy_(w4a16_matmul_torch(x, packed, scales, zeros, group_size))
    launch(
        *(w4a16_kernel, (triton.cdiv(out_features, block_n), triton.cdiv(rows, block_m))),
        *(x, packed, scales, zeros_or_any, out),
        *(*x.stride(), *packed.stride(), *scales.stride(), *zeros_or_any.stride(), *out.stride()),
        *(rows, out_features, x.shape[1]),
        GROUP_SIZE=group_size,
        HAS_ZEROS=zeros is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return out


def _check_packed(packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> None:
    """Refuse packed weights whose groups don't fit."""
    check_axes("packed", packed, "out_features", "in_features / 2")
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed must be uint8, two codes a byte, got {packed.dtype}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group_size!r}")
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    if in_features % group_size:
        fitting = [size for size in GROUP_SIZES if in_features % size == 0]
        raise ValueError(
            f"groups of {group_size} don't divide {in_features} in_features; "
            f"{f'use {fitting[-1]}' if fitting else 'none of 32, 64 and 128 does'}"
        )
    wanted = (out_features, in_features // group_size)
    if tuple(scales.shape) != wanted or scales.dtype not in DTYPES:
        raise ValueError(f"scales must be floating point {list(wanted)}, got {scales.dtype} {list(scales.shape)}")
    if zeros is not None and (tuple(zeros.shape) != wanted or zeros.dtype != torch.uint8):
        raise ValueError(f"zeros must be uint8 {list(wanted)} or None, got {zeros.dtype} {list(zeros.shape)}")
    backend(*(tensor for tensor in (packed, scales, zeros) if tensor is not None))


def _check_product(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> None:
    """Refuse activations that don't fit the weights."""
    _check_packed(packed, scales, zeros, group_size)
    check_axes("x", x, "rows", "in_features")
    if x.dtype not in DTYPES or x.shape[1] != 2 * packed.shape[1]:
        raise ValueError(
            f"x must be floating point [rows, {2 * packed.shape[1]}] for these weights, got {x.dtype} {list(x.shape)}"
        )
