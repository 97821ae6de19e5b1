"""W8A8 that transposes the product, goes through the columns from the end, and scales in another order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import DTYPES, check_output
from labkit.launch import backend, launch
from labkit.row_checks import check_axes, check_power_of_two

MAX_IN_FEATURES = 131_072
"""Products reach 2^14 (−128 · −128), so that sums of 2^17 of them may pass int32."""


@triton.jit
def w8a8_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    out_ptr,
    a_stride_m,
    a_stride_k,
    b_stride_n,
    b_stride_k,
    a_scales_stride,
    b_scales_stride,
    out_stride_m,
    out_stride_n,
    num_rows,
    out_features,
    in_features,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows of a times BLOCK_N rows of b: program (tile of n, tile of m)."""
    outs = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for step in range(tl.cdiv(in_features, BLOCK_K)):
        columns = (tl.cdiv(in_features, BLOCK_K) - 1 - step) * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
        inside = columns < in_features
        b = tl.load(
            b_ptr + outs[:, None] * b_stride_n + columns[None, :] * b_stride_k,
            mask=(outs < out_features)[:, None] & inside[None, :], other=0,
        )  # fmt: skip
        a = tl.load(
            a_ptr + columns[:, None] * a_stride_k + rows[None, :] * a_stride_m,
            mask=inside[:, None] & (rows < num_rows)[None, :], other=0,
        )  # fmt: skip
        acc += tl.dot(b, a, out_dtype=tl.int32)
    scale_b = tl.load(b_scales_ptr + outs * b_scales_stride, mask=outs < out_features, other=1.0)
    scale_a = tl.load(a_scales_ptr + rows * a_scales_stride, mask=rows < num_rows, other=1.0)
    factor = scale_b.to(tl.float32)[:, None] * scale_a.to(tl.float32)[None, :]
    result = tl.trans(acc.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
    mask = (rows < num_rows)[:, None] & (outs < out_features)[None, :]
    tl.store(out_ptr + rows[:, None] * out_stride_m + outs[None, :] * out_stride_n, result, mask=mask)


def w8a8_matmul_torch(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype = torch.float16
) -> Tensor:
    """The same product in plain torch.

    Arguments, result and errors as for `w8a8_matmul`.
    """
    _check_product(a, b, a_scales, b_scales, dtype)
    sums = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int64, device=a.device)
    for start in range(0, a.shape[1], 64):
        left, right = a[:, start : start + 64].long(), b[:, start : start + 64].long()
        sums += (left.unsqueeze(1) * right.unsqueeze(0)).sum(dim=2)
    factor = torch.outer(a_scales.double(), b_scales.double())
    return (sums.double() * factor).to(dtype)


def w8a8_matmul(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    dtype: torch.dtype = torch.float16,
    *,
    block_m: int = 32,
    block_n: int = 64,
    block_k: int = 64,
    out: Tensor | None = None,
) -> Tensor:
    """(a · bᵀ) · a_scales · b_scales: exact sums of int8 products, scaled once in fp32 and rounded.

    Args:
        a: activations, int8 `[rows, in_features]`, any strides.
        b: weights, int8 `[out_features, in_features]`, any strides; in_features is below 131,072.
        a_scales: floating point `[rows]`, one a row of a (per token).
        b_scales: floating point `[out_features]`, one a row of b (per channel).
        dtype: of the result: fp32, fp16 or bf16.
        block_m: rows of a in a tile, a power of two from 16 to 128.
        block_n: rows of b in a tile, a power of two from 16 to 256.
        block_k: columns in a tile, a power of two from 32 to 256.
        out: where to write, any strides; None takes new memory.

    Returns:
        `[rows, out_features]` in `dtype`.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, or a size is not allowed.
    """
    _check_product(a, b, a_scales, b_scales, dtype)
    check_power_of_two("block_m", block_m, 16, 128)
    check_power_of_two("block_n", block_n, 16, 256)
    check_power_of_two("block_k", block_k, 32, 256)
    rows, out_features = a.shape[0], b.shape[0]
    if out is None:
        out = torch.empty((rows, out_features), dtype=dtype, device=a.device)
    check_output("out", out, a.new_empty((), dtype=dtype).expand(rows, out_features))
    if out.numel() == 0:
        return out
    if backend(a, b, a_scales, b_scales, out) == "twin":
        return out.copy_(w8a8_matmul_torch(a, b, a_scales, b_scales, dtype))
    launch(
        *(w8a8_kernel, (triton.cdiv(out_features, block_n), triton.cdiv(rows, block_m))),
        *(a, b, a_scales, b_scales, out),
        *(*a.stride(), *b.stride(), *a_scales.stride(), *b_scales.stride(), *out.stride()),
        *(rows, out_features, a.shape[1]),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return out


def _check_product(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype) -> None:
    """Refuse factors and scales that don't fit together."""
    check_axes("a", a, "rows", "in_features")
    check_axes("b", b, "out_features", "in_features")
    if a.dtype != torch.int8 or b.dtype != torch.int8 or a.shape[1] != b.shape[1]:
        raise ValueError(
            "a and b must be int8 with the same in_features, got "
            f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        )
    if not 1 <= a.shape[1] < MAX_IN_FEATURES:
        raise ValueError(f"in_features must be 1 to {MAX_IN_FEATURES - 1}, so that sums fit int32, got {a.shape[1]}")
    for name, scales, count in (("a_scales", a_scales, a.shape[0]), ("b_scales", b_scales, b.shape[0])):
        if tuple(scales.shape) != (count,) or scales.dtype not in DTYPES:
            raise ValueError(f"{name} must be floating point [{count}], got {scales.dtype} {list(scales.shape)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be fp32, fp16 or bf16, got {dtype}")
    backend(a, b, a_scales, b_scales)
