"""Tokens drawn by lab 06's sampling kernel: temperature and filters in one launch that asks the device nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solutions.kernels.sampling_kernel import fused_sample

from ..sampler import Row

_BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1; a uniform of float64 may round to 1."""

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures that float32 divides by; beyond them nothing changes any more."""


def draw_fused(logits: Tensor, rows: Sequence[Row], uniforms: Sequence[float]) -> Tensor:
    """See `sampler.Draw`. Masses are sums in float32: a token at the very edge of a filter may fall on either side."""
    params = [row.request.params for row in rows]
    settings = [
        (_temperature(one.temperature), one.top_p, min(one.min_p, 2.0), min(number, _BELOW_ONE))
        for one, number in zip(params, uniforms, strict=True)
    ]
    numbers = torch.tensor(settings, dtype=torch.float32, device=logits.device)
    top_k = torch.tensor([min(one.top_k, logits.shape[1]) for one in params], dtype=torch.int32, device=logits.device)
    temperatures, top_p, min_p, below = numbers.unbind(1)
    return fused_sample(logits, temperatures, top_k, top_p, min_p, below)


def _temperature(wanted: float) -> float:
    return min(max(wanted, _COLDEST), _HOTTEST) if wanted > 0 else 0.0
