"""Tokens drawn by lab 06's sampling kernel: temperature and filters in one launch that asks the device nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solutions.kernels.sampling_kernel import fused_sample

from ..sampler import Row

_BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1; a uniform of float64 may round to 1."""


def draw_fused(logits: Tensor, rows: Sequence[Row], uniforms: Sequence[float]) -> Tensor:
    """See `sampler.Draw`. Masses are sums in float32: a token at the very edge of a filter may fall on either side."""
    params = [row.request.params for row in rows]
    settings = [
        (one.temperature, one.top_p, one.min_p, min(number, _BELOW_ONE))
        for one, number in zip(params, uniforms, strict=True)
    ]
    numbers = torch.tensor(settings, dtype=torch.float32, device=logits.device)
    top_k = torch.tensor([one.top_k for one in params], dtype=torch.int32, device=logits.device)
    temperatures, top_p, min_p, below = numbers.unbind(1)
    return fused_sample(logits, temperatures, top_k, top_p, min_p, below)
