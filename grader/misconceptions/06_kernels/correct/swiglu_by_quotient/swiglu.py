"""SwiGLU by a quotient of two exponentials that are at most 1, and its twin by tanh."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.attention_checks import check_alike, check_output
from labkit.launch import backend, launch
from labkit.row_checks import check_axes, check_power_of_two

MAX_BLOCK = 16384
"""Columns in a tile."""


@triton.jit
def swiglu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride_row,
    gate_stride_column,
    up_stride_row,
    up_stride_column,
    out_stride_row,
    out_stride_column,
    num_columns,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row: program (row, tile)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    gate = tl.load(gate_ptr + row * gate_stride_row + columns * gate_stride_column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride_row + columns * up_stride_column, mask=inside, other=0.0)
    gate = gate.to(tl.float32)
    # silu(g) = g / (1 + e^-g); for large negative g the quotient of two exponentials, e^g · g / (1 + e^g).
    growth = tl.exp(tl.minimum(gate, 0.0))
    decay = tl.exp(-tl.maximum(gate, 0.0))
    product = up.to(tl.float32) * (gate * growth / (growth + decay))
    out_tile = out_ptr + row * out_stride_row + columns * out_stride_column
    tl.store(out_tile, product.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu_torch(gate: Tensor, up: Tensor) -> Tensor:
    """The same computation in plain torch.

    Arguments, result and errors as for `swiglu`.
    """
    _check_halves(gate, up)
    wide = gate.double()
    return (up.double() * wide * (0.5 + 0.5 * torch.tanh(wide / 2))).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor, *, block_size: int | None = None, out: Tensor | None = None) -> Tensor:
    """silu(gate) · up with silu(g) = g / (1 + exp(−g)), in fp32 and rounded once.

    Args:
        gate: `[rows, columns]` in fp32, fp16 or bf16, any strides: it may be one half of a joined projection.
        up: of the same shape and dtype, any strides.
        block_size: columns in a tile, a power of two up to 16,384; None chooses.
        out: where to write, any strides; None takes new memory. It may be `gate` or `up` itself.

    Returns:
        `[rows, columns]` in the dtype of `gate`.

    Raises:
        ValueError: the two differ in shape, dtype or device, or a dtype or the block size is not allowed.

    Source: Shazeer 2020 (2002.05202).
    """
    _check_halves(gate, up)
    rows, columns = gate.shape
    if block_size is None:
        block_size = min(1024, triton.next_power_of_2(max(1, columns)))
    check_power_of_two("block_size", block_size, 1, MAX_BLOCK)
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    check_output("out", out, gate)
    if gate.numel() == 0:
        return out
    if backend(gate, up, out) == "twin":
        return out.copy_(swiglu_torch(gate, up))
    launch(
        *(swiglu_kernel, (rows, triton.cdiv(columns, block_size)), gate, up, out),
        *(*gate.stride(), *up.stride(), *out.stride(), columns),
        BLOCK=block_size,
    )
    return out


def _check_halves(gate: Tensor, up: Tensor) -> None:
    """Refuse halves that don't fit together."""
    check_axes("gate", gate, "rows", "columns")
    check_alike(gate=gate, up=up)
    if up.shape != gate.shape:
        raise ValueError(f"gate and up must have the same shape, got {list(gate.shape)} and {list(up.shape)}")
