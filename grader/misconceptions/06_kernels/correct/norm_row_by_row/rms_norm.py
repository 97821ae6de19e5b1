"""RMSNorm in which the program walks through the rows of its tile, the weight in its hands."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_alike, check_output
from labkit.launch import backend, launch
from labkit.row_checks import check_axes, check_power_of_two

MAX_HIDDEN = 16384
MAX_TILE = 32768
"""Elements of a tile of rows."""


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    x_stride_row,
    x_stride_column,
    residual_stride_row,
    residual_stride_column,
    weight_stride,
    normed_stride_row,
    normed_stride_column,
    total_stride_row,
    total_stride_column,
    num_rows,
    hidden_size,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK_ROWS whole rows: program (tile of rows). total is the new residual; BLOCK columns hold a row."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK).to(tl.int64)
    inside = columns < hidden_size
    weight = tl.load(weight_ptr + columns * weight_stride, mask=inside, other=0.0).to(tl.float32)
    first = tl.min(rows, axis=0)
    for step in range(BLOCK_ROWS):
        row = first + step
        mask = inside & (row < num_rows)
        x = tl.load(x_ptr + row * x_stride_row + columns * x_stride_column, mask=mask, other=0.0)
        residual_row = residual_ptr + row * residual_stride_row
        residual = tl.load(residual_row + columns * residual_stride_column, mask=mask, other=0.0)
        stored = (x.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        total = stored.to(tl.float32)
        # The largest number first, so that the squares are at most 1.
        largest = tl.max(tl.abs(total), axis=0)
        largest = tl.where(largest > 0.0, largest, 1.0)
        share = tl.sum((total / largest) * (total / largest), axis=0) / hidden_size
        root = tl.sqrt(share * largest * largest + eps)
        normed = total / tl.where(root > 0.0, root, 1.0) * weight
        tl.store(total_ptr + row * total_stride_row + columns * total_stride_column, stored, mask=mask)
        normed_row = normed_ptr + row * normed_stride_row
        tl.store(normed_row + columns * normed_stride_column, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """The same computation in plain torch.

    Arguments, results and errors as for `add_rms_norm`.
    """
    _check_rows(x, residual, weight, eps)
    total = (x.double() + residual.double()).to(x.dtype)
    length = torch.linalg.vector_norm(total.double(), dim=1, keepdim=True)
    root = (length.square() / x.shape[1] + eps).sqrt()
    return (total.double() / root * weight.double()).to(x.dtype), total


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    block_rows: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The new residual x + residual, and its RMSNorm.

    The sum is rounded to the dtype of x, as it is stored; the norm is computed from the stored sum in fp32 and
    rounded once: total / sqrt(mean(total²) + eps) · weight.

    Args:
        x: a layer's output `[rows, hidden_size]`, in fp32, fp16 or bf16, any strides.
        residual: what it is added to, of the same shape and dtype, any strides.
        weight: `[hidden_size]`, of the same dtype.
        eps: at least 0; keeps rows of zeros finite.
        block_rows: rows in a tile, a power of two; None chooses one row. The weight is read once a tile.
        out: where to write normed and new residual, any strides; None takes new memory. They may be x and residual
            themselves.

    Returns:
        normed and new residual, both of the shape and dtype of x.

    Raises:
        ValueError: shapes, dtypes or devices don't fit together, a row or a tile is too large, or eps is negative.

    Source: Zhang and Sennrich 2019 (1910.07467).
    """
    _check_rows(x, residual, weight, eps)
    rows, hidden_size = x.shape
    block = triton.next_power_of_2(max(1, hidden_size))
    block_rows = 1 if block_rows is None else block_rows
    check_power_of_two("block_rows", block_rows, 1, MAX_TILE // block)
    normed, total = out or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    check_output("out[0]", normed, x)
    check_output("out[1]", total, x)
    if x.numel() == 0:
        return normed, total
    if backend(x, residual, weight, normed, total) == "twin":
        results = add_rms_norm_torch(x, residual, weight, eps)
        return normed.copy_(results[0]), total.copy_(results[1])
    launch(
        *(add_rms_norm_kernel, (triton.cdiv(rows, block_rows),), x, residual, weight, normed, total),
        *(*x.stride(), *residual.stride(), *weight.stride(), *normed.stride(), *total.stride()),
        *(rows, hidden_size, eps),
        BLOCK_ROWS=block_rows,
        BLOCK=block,
        num_warps=4 if block * block_rows <= 4096 else 8,
    )
    return normed, total


def _check_rows(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Refuse rows and weights that don't fit together."""
    check_axes("x", x, "rows", "hidden_size")
    check_axes("weight", weight, "hidden_size")
    check_alike(x=x, residual=residual, weight=weight)
    if residual.shape != x.shape or weight.shape[0] != x.shape[1]:
        raise ValueError(
            "residual must have the shape of x, and weight its number of columns, got "
            f"x {list(x.shape)}, residual {list(residual.shape)}, weight {list(weight.shape)}"
        )
    if x.shape[1] > MAX_HIDDEN:
        raise ValueError(f"a row must fit into a tile: hidden_size may be {MAX_HIDDEN} at most, got {x.shape[1]}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number of at least 0, got {eps!r}")
