"""Calls of the lab's launchers as a model makes them, for compiling their kernels without a GPU.

Each kernel in the dtypes it is for; where tiles lie in shared memory, with the largest heads, of which fp32 takes twice
the room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.instruments.compiled import Case

HALF, NARROW, FULL = torch.float16, torch.bfloat16, torch.float32

Arguments = Callable[[], tuple[Any, ...]]


def _heads(dtype: torch.dtype, heads: int, tokens: int, head_dim: int) -> Tensor:
    return torch.zeros(2, heads, tokens, head_dim, dtype=dtype)


def _attention(dtype: torch.dtype, head_dim: int, *more: Any) -> Arguments:
    """Queries of nine heads, keys and values of three."""
    return lambda: (
        _heads(dtype, 9, 512, head_dim), _heads(dtype, 3, 512, head_dim), _heads(dtype, 3, 512, head_dim), *more
    )  # fmt: skip


def _backward(dtype: torch.dtype, head_dim: int) -> Arguments:
    def make() -> tuple[Any, ...]:
        q, k, v = _attention(dtype, head_dim)()
        return q, k, v, q, torch.zeros(2, 9, 512), q

    return make


def _decode(dtype: torch.dtype, head_dim: int) -> Arguments:
    return lambda: (
        torch.zeros(2, 9, head_dim, dtype=dtype), _heads(dtype, 3, 512, head_dim), _heads(dtype, 3, 512, head_dim)
    )  # fmt: skip


def _paged(dtype: torch.dtype, head_dim: int) -> Arguments:
    def make() -> tuple[Any, ...]:
        blocks = torch.zeros(8, 16, 3, head_dim, dtype=dtype)
        tables = torch.zeros(2, 4, dtype=torch.int32)
        return torch.zeros(2, 9, head_dim, dtype=dtype), blocks, blocks, tables, torch.tensor([60, 7])

    return make


def _ragged(dtype: torch.dtype, head_dim: int) -> Arguments:
    def make() -> tuple[Any, ...]:
        bounds = torch.tensor([0, 40, 64], dtype=torch.int32)
        keys = torch.zeros(64, 3, head_dim, dtype=dtype)
        return torch.zeros(64, 9, head_dim, dtype=dtype), keys, keys, bounds, bounds, 40

    return make


def _rope(dtype: torch.dtype, head_dim: int) -> Arguments:
    def make() -> tuple[Any, ...]:
        q, k, _ = _attention(dtype, head_dim)()
        table = torch.zeros(512, head_dim // 2)
        return q, k, table, table, torch.arange(512).expand(2, 512)

    return make


def _w4a16(dtype: torch.dtype, group_size: int, with_zeros: bool) -> Arguments:
    def make() -> tuple[Any, ...]:
        scales = torch.ones(1536, 512 // group_size, dtype=dtype)
        zeros = torch.zeros(scales.shape, dtype=torch.uint8) if with_zeros else None
        packed = torch.zeros(1536, 256, dtype=torch.uint8)
        return torch.zeros(64, 512, dtype=dtype), packed, scales, zeros, group_size

    return make


def _rows(dtype: torch.dtype, columns: int) -> Tensor:
    return torch.zeros(8, columns, dtype=dtype)


def _sampling() -> tuple[Any, ...]:
    numbers = [torch.ones(8) for _ in range(4)]
    temperatures, top_p, min_p, uniforms = numbers
    return _rows(FULL, 49_152), temperatures, torch.ones(8, dtype=torch.int32), top_p, min_p, uniforms


def _w8a8() -> tuple[Any, ...]:
    a, b = torch.zeros(64, 576, dtype=torch.int8), torch.zeros(1536, 576, dtype=torch.int8)
    return a, b, torch.ones(64), torch.ones(1536)


HEADS = [(HALF, 64), (NARROW, 128), (FULL, 128), (HALF, 80)]

CASES = [
    *(Case(2, "fused_softmax", "fused_softmax", lambda d=d: (_rows(d, 1000),)) for d in (HALF, FULL)),
    Case(2, "fused_softmax", "fused_softmax", lambda: (_rows(HALF, 49_152),)),
    *(
        Case(3, "rms_norm", "add_rms_norm", lambda d=d: (_rows(d, 576), _rows(d, 576), torch.ones(576, dtype=d)))
        for d in (NARROW, FULL)
    ),
    *(Case(4, "rope", "apply_rope", _rope(*heads)) for heads in HEADS),
    *(Case(5, "swiglu", "swiglu", lambda d=d: (_rows(d, 1536), _rows(d, 1536))) for d in (NARROW, FULL)),
    *(Case(6, "flash_forward", "flash_attention_forward", _attention(*heads)) for heads in HEADS),
    *(Case(7, "flash_backward", "flash_attention_backward", _backward(*heads)) for heads in HEADS),
    *(Case(8, "flash_decoding", "flash_decoding", _decode(*heads)) for heads in HEADS),
    *(Case(9, "paged_decode", "paged_decode", _paged(*heads)) for heads in HEADS),
    *(
        Case(10, "w4a16", "w4a16_matmul", _w4a16(dtype, group, zeros))
        for dtype, group, zeros in ((HALF, 64, True), (NARROW, 128, False), (FULL, 128, True))
    ),
    *(Case(12, "ragged_prefill", "ragged_prefill", _ragged(*heads)) for heads in HEADS),
    *(Case(13, "sliding_window", "sliding_window_attention", _attention(*heads, 100)) for heads in HEADS),
    Case(14, "sampling_kernel", "fused_sample", _sampling),
    Case(15, "w8a8", "w8a8_matmul", _w8a8),
]
