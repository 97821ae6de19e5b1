"""Checks of what attention kernels are given: shapes, dtypes, devices, scales and tile sizes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 128
"""What tiles are sized for; with twice as many channels, fp32 ones outgrow a small card's shared memory."""
MIN_TILE = 16
"""Matrix units multiply 16 rows at least; the interpreter would take fewer, and a GPU refuse them."""
MAX_TILE = 256


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values that don't fit together.

    Args:
        q: `[batch, heads, num_queries, head_dim]`, any strides.
        k: `[batch, kv_heads, num_keys, head_dim]`, any strides.
        v: as `k`.

    Raises:
        ValueError: an axis, a dtype or a device is wrong, or `heads` is no multiple of `kv_heads`.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 axes [batch, heads, tokens, head_dim], got shape {list(tensor.shape)}"
            )
    check_alike(q=q, k=k, v=v)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch size, got {q.shape[0]} and {k.shape[0]}")
    check_heads(q.shape[1], k.shape[1], q.shape[-1], k.shape[-1])


def check_alike(**tensors: Tensor) -> None:
    """Refuse tensors that don't share one dtype that kernels compute in, and one device.

    Raises:
        ValueError: naming the tensors.
    """
    names = ", ".join(tensors)
    dtypes = [tensor.dtype for tensor in tensors.values()]
    if dtypes[0] not in DTYPES or len(set(dtypes)) != 1:
        raise ValueError(f"{names} must share one of the dtypes fp32, fp16 and bf16, got {dtypes}")
    devices = [str(tensor.device) for tensor in tensors.values()]
    if len(set(devices)) != 1:
        raise ValueError(f"{names} must lie on one device, got {devices}")


def check_heads(heads: int, kv_heads: int, head_dim: int, kv_head_dim: int) -> None:
    """Refuse head counts and head dims that can't be grouped.

    Raises:
        ValueError: `heads` is no multiple of `kv_heads`, or the head dims differ or are too large.
    """
    if kv_heads < 1 or heads < 1 or heads % kv_heads != 0:
        raise ValueError(f"the number of query heads must be a multiple of the kv heads, got {heads} and {kv_heads}")
    if head_dim != kv_head_dim or not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"queries and keys must share a head_dim from 1 to {MAX_HEAD_DIM}, got {head_dim} and {kv_head_dim}"
        )


def check_tile(name: str, size: int) -> None:
    """Refuse a tile size that a GPU would refuse.

    Raises:
        ValueError: it is no power of two from 16 to 256.
    """
    is_count = isinstance(size, int) and not isinstance(size, bool)
    if not is_count or not MIN_TILE <= size <= MAX_TILE or size & (size - 1):
        raise ValueError(f"{name} must be a power of two from {MIN_TILE} to {MAX_TILE}, got {size!r}")


def check_output(name: str, out: Tensor, like: Tensor) -> None:
    """Refuse an output that isn't of another tensor's shape, dtype and device.

    Raises:
        ValueError: naming both.
    """
    if out.shape != like.shape or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} of shape {list(like.shape)} on {like.device}, "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )


def score_scale(scale: float | None, head_dim: int) -> float:
    """The factor on the scores: as given, or 1 / sqrt(head_dim) for None.

    Raises:
        ValueError: it is not finite.
    """
    if scale is None:
        return head_dim**-0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, or None for 1/sqrt(head_dim), got {scale!r}")
    return float(scale)
