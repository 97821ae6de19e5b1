"""A check of rotations, which many methods are given or learn."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.quantization_checks import check_finite


def check_rotation(name: str, rotation: Tensor, size: int) -> None:
    """Refuse a matrix that changes lengths.

    Args:
        name: of the argument, for the message.
        rotation: should be orthogonal, within 10⁻⁵.
        size: of its sides.

    Raises:
        ValueError: another shape, NaN or infinity, or columns that aren't orthogonal and of length 1.
    """
    check_finite(name, rotation)
    if rotation.shape != (size, size):
        raise ValueError(f"{name} must be [{size}, {size}], got {list(rotation.shape)}")
    wide = rotation.double()
    error = float((wide.T @ wide - torch.eye(size, dtype=torch.float64)).abs().max())
    if error > 1e-5:
        raise ValueError(f"{name} isn't orthogonal: QᵀQ differs from the identity by {error:.3g}")
