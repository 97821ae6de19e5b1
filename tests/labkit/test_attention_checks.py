"""Attention kernels get what fits together, or a message that names what doesn't."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.attention_checks import check_alike, check_attention, check_output, check_tile, score_scale
from labkit.tuning import num_multiprocessors


def qkv(heads: int = 4, kv_heads: int = 2, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Small tensors that fit."""
    return [
        torch.zeros(2, count, tokens, head_dim, dtype=dtype)
        for count, tokens in ((heads, 3), (kv_heads, 5), (kv_heads, 5))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_fits_passes(dtype: torch.dtype) -> None:
    check_attention(*qkv(dtype=dtype))
    check_attention(*qkv(heads=6, kv_heads=3, head_dim=128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "q must have 4 axes"),
        (lambda q, k, v: (q, k, v[:, :, :2]), "same shape"),
        (lambda q, k, v: (q[:1], k, v), "batch size"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of the kv heads, got 3 and 2"),
        (lambda q, k, v: (q[..., :4], k, v), "head_dim"),
        (lambda q, k, v: (q, k.half(), v), "dtypes"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "dtypes"),
        (lambda q, k, v: (q.to("meta"), k, v), "one device"),
        (lambda q, k, v: tuple(t.repeat(1, 1, 1, 17) for t in (q, k, v)), "head_dim from 1 to 128"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_attention(*change(*qkv()))  # type: ignore[operator]


@pytest.mark.parametrize("size", [16, 64, 256])
def test_tiles_are_powers_of_two(size: int) -> None:
    check_tile("block_q", size)
    for wrong in (size + 1, size * 3, -size, float(size), True, 8, 512):
        with pytest.raises(ValueError, match="block_q must be a power of two from 16 to 256"):
            check_tile("block_q", wrong)  # type: ignore[arg-type]


def test_outputs_are_like_their_inputs() -> None:
    q, k, _ = qkv()
    check_output("out", torch.empty_like(q), q)
    for wrong in (k, q.half(), q.to("meta")):
        with pytest.raises(ValueError, match=r"out must be torch\.float32 of shape"):
            check_output("out", wrong, q)
    with pytest.raises(ValueError, match="one of the dtypes"):
        check_alike(a=q.long(), b=q.long())


def test_the_scale_is_given_or_follows_from_head_dim() -> None:
    assert score_scale(None, 64) == 0.125
    assert score_scale(0.0, 64) == 0.0
    for wrong in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite"):
            score_scale(wrong, 64)


def test_a_cpu_runs_one_program_at_a_time() -> None:
    assert num_multiprocessors(torch.device("cpu")) == 1
