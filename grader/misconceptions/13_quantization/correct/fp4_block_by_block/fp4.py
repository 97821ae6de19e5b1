"""FP4 by comparing with the thresholds between its numbers, one after another."""

from __future__ import annotations

import torch
from torch import Tensor

# Between codes c and c + 1. Where c is even, halfway belongs to it; where it is odd, to the next.
BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_fp4(x: Tensor) -> Tensor:
    """Counts the thresholds that a magnitude has passed."""
    for place in (~x.isfinite()).nonzero().tolist():
        raise ValueError(f"no code for what is at {place}")
    magnitude = x.abs().double()
    code = torch.zeros(x.shape, dtype=torch.uint8)
    for below, threshold in enumerate(BETWEEN):
        code += magnitude > threshold if below % 2 == 0 else magnitude >= threshold
    return code | (x.signbit().to(torch.uint8) << 3)


def decode_fp4(codes: Tensor) -> Tensor:
    """Sign, exponent and mantissa by arithmetic."""
    for place in ((codes < 0) | (codes > 15)).nonzero().tolist():
        raise ValueError(f"{codes[tuple(place)].item()} is no code of 4 bits")
    exponent, mantissa = codes.long() % 8 // 2, codes.long() % 2
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, (2 + mantissa) * 2**exponent / 4)
    return torch.where(codes > 7, -magnitude, magnitude).float()
