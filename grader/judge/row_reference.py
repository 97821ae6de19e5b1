"""Reference mathematics of the row kernels of lab 06, written another way than the solutions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax_rows64(scores: Tensor) -> Tensor:
    """The softmax of each row in float64, over the scores above -inf alone; a row without any gives 0.

    Args:
        scores: `[rows, columns]`.
    """
    result = torch.zeros(scores.shape, dtype=torch.float64)
    for row, line in enumerate(scores.double()):
        visible = line > -math.inf
        if bool(visible.any()):
            result[row, visible] = line[visible].softmax(dim=0)
    return result


def plain_softmax(scores: Tensor) -> Tensor:
    """torch's softmax in the scores' own dtype: the measure of how much error that dtype costs."""
    return scores.softmax(dim=-1).nan_to_num(0.0)


def rms_norm64(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row in float64: divided by the root of the mean square, times the weight.

    Args:
        total: `[rows, hidden_size]`.
        weight: `[hidden_size]`.
        eps: added to the mean square.
    """
    rows = total.double()
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / (length**2 / rows.shape[1] + eps).sqrt() * weight.double()


def rope64(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE in float64, as a product of complex numbers: channel i with i + head_dim / 2 turns by position · frequency.

    Args:
        x: `[batch, heads, tokens, head_dim]`.
        positions: `[batch, tokens]`.
        theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = positions.double()[:, None, :, None] * torch.exp(-exponents * math.log(theta))
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def swiglu64(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up in float64."""
    return torch.nn.functional.silu(gate.double()) * up.double()
