"""Q4_K as the packed int4 product takes it: codes, and a scale and a middle for each 32 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.quantization.k_quants import Q4_K_BYTES, decode_q4_k

_BLOCK = 32
_MINIMUM_SCALE = slice(2, 4)
_CODES = slice(16, Q4_K_BYTES)
"""Bytes of a super-block that hold the factor of all minima, and the 256 codes."""


def split_q4_k(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Takes value = scale · code − minimum apart by asking lab 13's decoder, which alone knows the layout.

    Args:
        data: uint8 `[rows, super-blocks · 144]`.

    Returns:
        Codes 0 … 15, `[rows, columns]`; scales and minima, float32 `[rows, columns / 32]`.
    """
    blocks = data.unflatten(-1, (-1, Q4_K_BYTES))
    lowest, steps = blocks.clone(), blocks.clone()
    lowest[..., _CODES] = 0
    steps[..., _CODES], steps[..., _MINIMUM_SCALE] = 0x11, 0  # every code is 1, and there are no minima
    minimum, scale = (-decode_q4_k(lowest.flatten(1)), decode_q4_k(steps.flatten(1)))
    # Where the scale is 0 the code does not matter.
    codes = ((decode_q4_k(data) + minimum) / scale.where(scale != 0, 1.0)).round().to(torch.int32)
    return codes, scale[:, ::_BLOCK], minimum[:, ::_BLOCK]
