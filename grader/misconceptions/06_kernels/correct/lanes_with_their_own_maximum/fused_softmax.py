"""A softmax kernel in which each lane keeps a maximum and a total of its own, which meet at the end."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_alike, check_output
from labkit.launch import backend, launch
from labkit.row_checks import check_axes, check_power_of_two

MAX_BLOCK = 16384
"""Columns in a tile; a program keeps the tile in registers."""


@triton.jit
def softmax_kernel(
    x_ptr,
    out_ptr,
    x_stride_row,
    x_stride_column,
    out_stride_row,
    out_stride_column,
    num_columns,
    ONE_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: program (row). ONE_TILE says that a tile of BLOCK columns holds the whole of it."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride_row
    out_row = out_ptr + row * out_stride_row
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    lane_max = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    scores = lane_max
    for start in range(0, num_columns, BLOCK):
        inside = start + lanes < num_columns
        scores = tl.load(x_row + (start + lanes) * x_stride_column, mask=inside, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, scores)
        lowest = tl.where(new_max == float("-inf"), 0.0, new_max)
        lane_sum = lane_sum * tl.exp(lane_max - lowest) + tl.exp(scores - lowest)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(lane_sum * tl.exp(lane_max - row_max), axis=0)
    factor = tl.where(row_sum > 0.0, 1.0 / tl.where(row_sum > 0.0, row_sum, 1.0), 0.0)
    for start in range(0, num_columns, BLOCK):
        inside = start + lanes < num_columns
        if not ONE_TILE:
            scores = tl.load(x_row + (start + lanes) * x_stride_column, mask=inside, other=float("-inf")).to(tl.float32)
        weights = tl.exp(scores - row_max) * factor
        tl.store(out_row + (start + lanes) * out_stride_column, weights.to(out_ptr.dtype.element_ty), mask=inside)


def fused_softmax_torch(x: Tensor) -> Tensor:
    """The same computation in plain torch, which moves each intermediate through memory.

    Argument, result and errors as for `fused_softmax`.
    """
    check_axes("x", x, "rows", "columns")
    check_alike(x=x)
    wide = x.double()
    weights = torch.zeros_like(wide)
    for row in range(x.shape[0]):
        visible = wide[row] > -math.inf
        if bool(visible.any()):
            shares = (wide[row, visible] - wide[row, visible].max()).exp()
            weights[row, visible] = shares / shares.sum()
    return weights.to(x.dtype)


def fused_softmax(x: Tensor, *, block_size: int | None = None, out: Tensor | None = None) -> Tensor:
    """The softmax of each row, computed in fp32 and rounded once.

    A row that fits into a tile is read once. A longer one is read twice, a tile at a time: for maximum and total, and
    for the weights.

    Args:
        x: scores `[rows, columns]` in fp32, fp16 or bf16, any strides; finite, or -inf for "hidden".
        block_size: columns in a tile, a power of two up to 16,384; None takes one tile for the row where that will do.
        out: where to write, any strides; None takes new memory.

    Returns:
        Weights of the shape and dtype of x; a row whose scores are all -inf gives 0.

    Raises:
        ValueError: x has not two axes, a dtype or the block size is not allowed, or `out` doesn't match.
    """
    check_axes("x", x, "rows", "columns")
    check_alike(x=x)
    rows, columns = x.shape
    if block_size is None:
        block_size = min(MAX_BLOCK, triton.next_power_of_2(max(1, columns)))
    check_power_of_two("block_size", block_size, 1, MAX_BLOCK)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_output("out", out, x)
    if x.numel() == 0:
        return out
    if backend(x, out) == "twin":
        return out.copy_(fused_softmax_torch(x))
    launch(
        *(softmax_kernel, (rows,), x, out, *x.stride(), *out.stride(), columns),
        ONE_TILE=columns <= block_size,
        BLOCK=block_size,
        num_warps=4 if block_size <= 4096 else 8,
    )
    return out
