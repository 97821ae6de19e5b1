"""Kernels that do one thing each, most of them wrong, for the instruments to see."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.launch import launch


@triton.jit
def softmax_kernel(x_ptr, y_ptr, stride, length, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < length
    x = tl.load(x_ptr + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * stride + columns, weights / tl.sum(weights, axis=0), mask=inside)


def softmax(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(softmax_kernel, (len(x),), x, y, x.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def decorative_softmax(x: Tensor) -> Tensor:
    softmax(x)
    return x.exp() / x.exp().sum(-1, keepdim=True)


def bare_softmax(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    softmax_kernel[(len(x),)](x, y, x.stride(0), x.shape[1], BLOCK=1024)
    return y


@triton.jit
def copy_kernel(x_ptr, y_ptr, shift, length, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at + shift, mask=at < length, other=0.0), mask=at < length)


def copy(x: Tensor, shift: int = 0, length: int | None = None) -> Tensor:
    """Copies from `shift` on, with no regard for where the tensor lies."""
    length = len(x) if length is None else length
    y = torch.zeros(length, dtype=x.dtype)
    launch(copy_kernel, (triton.cdiv(length, 4),), x, y, shift, length, BLOCK=4)
    return y


def read_view(x: Tensor) -> Tensor:
    """Reads a whole row of the storage, of which `x` is only a part."""
    y = torch.zeros(x.stride(0))
    launch(copy_kernel, (1,), x, y, 0, x.stride(0), BLOCK=triton.next_power_of_2(x.stride(0)))
    return y


@triton.jit
def unmasked_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def unmasked_copy(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(unmasked_kernel, (len(x) // 4,), x, y, BLOCK=4)
    return y


@triton.jit
def total_kernel(x_ptr, y_ptr, length, USE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < length)
    if USE == "mask":
        x = tl.where(at < length, x, 0.0)
    tl.store(y_ptr, tl.max(x, axis=0) if USE == "max" else tl.sum(x, axis=0))


def total(x: Tensor, use: str) -> Tensor:
    """Sums or takes the maximum of a load without `other`; with "mask" it puts 0 into the undefined lanes itself."""
    y = torch.zeros(1)
    launch(total_kernel, (1,), x, y, len(x), USE=use, BLOCK=16)
    return y


@triton.jit
def gram_kernel(x_ptr, y_ptr, ROWS: tl.constexpr, INNER: tl.constexpr):
    rows, inner = tl.arange(0, ROWS), tl.arange(0, INNER)
    x = tl.load(x_ptr + rows[:, None] * INNER + inner[None, :])
    y = tl.dot(x, tl.trans(x), input_precision="ieee")
    tl.store(y_ptr + rows[:, None] * ROWS + rows[None, :], y)


def gram(x: Tensor) -> Tensor:
    y = torch.empty(len(x), len(x), dtype=torch.int32 if x.dtype == torch.int8 else torch.float32)
    launch(gram_kernel, (1,), x, y, ROWS=len(x), INNER=x.shape[1])
    return y


@triton.jit
def strided_kernel(x_ptr, y_ptr, stride, length, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride, mask=row < length, other=0.0)
    tl.store(y_ptr + row, x, mask=row < length)


def first_of_rows(stride: int) -> Tensor:
    """The first element of one row, by a block of rows whose offsets are computed all the same."""
    y = torch.zeros(1)
    launch(strided_kernel, (1,), torch.ones(1), y, stride, 1, BLOCK=8)
    return y


@triton.jit
def narrow_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at).to(tl.bfloat16)
    tl.store(y_ptr + at, (x + x).to(tl.float32))


def double_in_bf16(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(narrow_kernel, (1,), x, y, BLOCK=len(x))
    return y


@triton.jit
def histogram_kernel(bins_ptr, counts_ptr, BLOCK: tl.constexpr):
    bins = tl.load(bins_ptr + tl.arange(0, BLOCK))
    tl.atomic_add(counts_ptr + bins, 1)


def histogram(bins: Tensor, num_bins: int) -> Tensor:
    counts = torch.zeros(num_bins, dtype=torch.int32)
    launch(histogram_kernel, (1,), bins, counts, BLOCK=len(bins))
    return counts


@triton.jit
def nibbles_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    packed = tl.load(x_ptr + at // 8)
    tl.store(y_ptr + at, (packed >> (at % 8) * 4) & 15)


def nibbles(x: Tensor) -> Tensor:
    y = torch.empty(8 * len(x), dtype=torch.int32)
    launch(nibbles_kernel, (1,), x, y, BLOCK=8 * len(x))
    return y


@triton.jit
def stub_kernel(x_ptr):
    tl.static_assert(False, "lab 97 task 1: stub_kernel is not written yet. Do it. ")


def stub(x: Tensor) -> Tensor:
    launch(stub_kernel, (1,), x)
    return x


def attention_by_another_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    module = torch._C._nn
    name = "".join(("scaled", "_dot_", "product_", "attention"))
    return getattr(module, name)(q, k, v)


def composed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


@triton.jit
def greedy_kernel(x_ptr, y_ptr, SIDE: tl.constexpr):
    side = tl.arange(0, SIDE)
    at = side[:, None] * SIDE + side[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, tl.trans(x)).to(tl.float16))


def greedy_gram(side: int) -> Tensor:
    """A product whose operands lie in shared memory whole."""
    x = torch.zeros(side, side, dtype=torch.float16)
    y = torch.empty_like(x)
    launch(greedy_kernel, (1,), x, y, SIDE=side, num_warps=8)
    return y


def tuned_gram(*sides: int) -> Tensor:
    """The same with a tuner that may choose the side."""
    configs = [triton.Config({"SIDE": side}, num_warps=8) for side in sides]
    x = torch.zeros(max(sides), max(sides), dtype=torch.float16)
    y = torch.empty_like(x)
    launch(triton.autotune(configs, key=[])(greedy_kernel), (1,), x, y)
    return y


@triton.jit
def blocks_kernel(x_ptr, y_ptr, rows, columns, SIDE: tl.constexpr, HOW: tl.constexpr):
    if HOW == "pointer":
        x = tl.load(
            tl.make_block_ptr(x_ptr, (rows, columns), (columns, 1), (0, 0), (SIDE, SIDE), (1, 0)),
            boundary_check=(0, 1),
            padding_option="zero",
        )
    else:
        x = tl.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [SIDE, SIDE]).load([0, 0])
    side = tl.arange(0, SIDE)
    tl.store(y_ptr + side, tl.sum(x, axis=1), mask=side < rows)


def row_sums(x: Tensor, how: str) -> Tensor:
    """Reads a tile that reaches over both edges, by a block pointer or by a tensor map."""
    y = torch.empty(len(x))
    launch(blocks_kernel, (1,), x, y, *x.shape, SIDE=8, HOW=how)
    return y


@triton.jit
def interleave_kernel(a_ptr, b_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    chosen = tl.where(at % 2 == 0, a_ptr + at // 2, b_ptr + at // 2)
    tl.store(y_ptr + at, tl.load(chosen))


def interleave(a: Tensor, b: Tensor, length: int) -> Tensor:
    y = torch.empty(length)
    launch(interleave_kernel, (1,), a, b, y, BLOCK=length)
    return y
