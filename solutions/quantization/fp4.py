"""Task 12: the 16 floats of 4 bits, FP4 E2M1."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.quantization_checks import check_finite, check_integers

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for: 2 exponent bits with bias 1, 1 mantissa bit, no infinity and no NaN. The codes from
8 on are their negatives, beginning with -0."""


def encode_fp4(x: Tensor) -> Tensor:
    """The codes of the nearest numbers; of two equally near ones the one whose code is even. Beyond 6 there is only 6.

    Args:
        x: floating point, of any shape.

    Returns:
        uint8 from 0 to 15, of the same shape; the sign is kept, also that of 0.

    Raises:
        ValueError: a value that is not finite: the format has no code for it.

    Source: OCP Microscaling Formats v1.0, section 5.3.3.
    """
    check_finite("x", x)
    # BEGIN SOLUTION
    magnitude = x.to(torch.promote_types(x.dtype, torch.float32)).abs()
    # From 2 on neighbours are 1 apart, from 4 on 2; an even number of steps has an even code in each range.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = ((magnitude / step).round() * step).clamp(max=6)
    magnitudes = torch.tensor(MAGNITUDES, dtype=rounded.dtype, device=x.device)
    code = torch.searchsorted(magnitudes, rounded.contiguous())
    return torch.where(x.signbit(), code + 8, code).to(torch.uint8)
    # END SOLUTION


def decode_fp4(codes: Tensor) -> Tensor:
    """The numbers that codes of 4 bits stand for.

    Args:
        codes: integers from 0 to 15, of any shape.

    Returns:
        float32, of the same shape.

    Raises:
        ValueError: another code.
    """
    check_integers("codes", codes, 0, 15)
    # BEGIN SOLUTION
    magnitudes = torch.tensor(MAGNITUDES, device=codes.device)
    return torch.cat([magnitudes, -magnitudes])[codes.int()]
    # END SOLUTION
