"""W4A16 that scales the weights in registers before the product, and splits x into its even and odd columns."""

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
    even, odd = (codes[:, parity::2].to(torch.int16).remainder(16) for parity in (0, 1))
    return (even + 16 * odd).to(torch.uint8)


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
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    codes = torch.empty(out_features, in_features, dtype=torch.int16, device=packed.device)
    codes[:, 0::2] = packed.to(torch.int16) % 16
    codes[:, 1::2] = packed.to(torch.int16) // 16
    grouped = codes.unflatten(1, (-1, group_size))
    shifted = (grouped + 8) % 16 - 8 if zeros is None else grouped - zeros.to(torch.int16).unsqueeze(2)
    return (shifted.double() * scales.double().unsqueeze(2)).float().flatten(1)


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
    here, there = rows < num_rows, outs < out_features
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in range(in_features // BLOCK_K):
        pairs = tile * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2).to(tl.int64)
        byte = tl.load(
            packed_ptr + outs[:, None] * packed_stride_n + pairs[None, :] * packed_stride_byte,
            mask=there[:, None], other=0,
        ).to(tl.int32)  # fmt: skip
        group = tile * BLOCK_K // GROUP_SIZE
        scale = tl.load(scales_ptr + outs * scales_stride_n + group * scales_stride_group, mask=there, other=0.0)
        low, high = byte & 15, byte >> 4
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + outs * zeros_stride_n + group * zeros_stride_group, mask=there, other=0)
            low, high = low - zero.to(tl.int32)[:, None], high - zero.to(tl.int32)[:, None]
        else:
            # Flipping the sign bit and taking 8 away sends 8..15 to -8..-1.
            low, high = (low ^ 8) - 8, (high ^ 8) - 8
        x_row = x_ptr + rows[None, :] * x_stride_m + 2 * pairs[:, None] * x_stride_k
        even = tl.load(x_row, mask=here[None, :], other=0.0).to(tl.float32)
        odd = tl.load(x_row + x_stride_k, mask=here[None, :], other=0.0).to(tl.float32)
        weights_even = low.to(tl.float32) * scale.to(tl.float32)[:, None]
        weights_odd = high.to(tl.float32) * scale.to(tl.float32)[:, None]
        acc += tl.dot(weights_even, even, input_precision="ieee") + tl.dot(weights_odd, odd, input_precision="ieee")
    out_tile = out_ptr + outs[:, None] * out_stride_n + rows[None, :] * out_stride_m
    tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & here[None, :])


def w4a16_matmul_torch(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> Tensor:
    """The same product in plain torch, which writes the weights out first.

    Arguments, result and errors as for `w4a16_matmul`.
    """
    _check_product(x, packed, scales, zeros, group_size)
    # Group by group, so that no more than one group's weights are written out at a time.
    result = torch.zeros(x.shape[0], packed.shape[0], dtype=torch.float32, device=x.device)
    for group in range(scales.shape[1]):
        nibbles = slice(group * group_size // 2, (group + 1) * group_size // 2)
        one = slice(group, group + 1)
        shifts = None if zeros is None else zeros[:, one]
        weights = dequantize_int4(packed[:, nibbles], scales[:, one], shifts, group_size)
        result += x[:, group * group_size : (group + 1) * group_size].float() @ weights.T
    return result.to(x.dtype)


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
