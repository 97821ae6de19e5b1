"""Matrices in four bits: one scale for each group of 32 numbers of a row, two numbers in a byte."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

GROUP_SIZE = 32
LARGEST = 7
_PACKED, _SCALES = ".int4", ".scales"


def quantized(matrix: Tensor) -> Tensor:
    """What is left of a matrix after packing and unpacking, `[rows, columns]`, in its own dtype."""
    numbers, scales = _quantize(matrix)
    return _dequantize(numbers, scales).to(matrix.dtype)


def pack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are stored.

    Args:
        weights: floating point by name; matrices, whose columns must be a multiple of 32, are quantized, and vectors
            become float16.

    Returns:
        For each matrix "<name>.int4", uint8 `[rows, columns / 2]`, the even columns in the low halves, and
        "<name>.scales", float16 `[rows, columns / 32]`; vectors under their own names.

    Raises:
        ValueError: a weight that is neither vector nor matrix, that is not finite, or whose columns don't divide.
    """
    stored = {}
    for name, weight in weights.items():
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite; the training has gone wrong")
        if weight.dim() == 1:
            stored[name] = weight.to(torch.float16)
        elif weight.dim() == 2 and weight.shape[1] % GROUP_SIZE == 0:
            numbers, scales = _quantize(weight)
            shifted = (numbers.flatten(1) + 8).to(torch.uint8)
            stored[name + _PACKED] = shifted[:, 0::2] | (shifted[:, 1::2] << 4)
            stored[name + _SCALES] = scales
        else:
            raise ValueError(
                f"{name} must be a vector, or a matrix whose columns are a multiple of {GROUP_SIZE}, got "
                f"{list(weight.shape)}"
            )
    return stored


def unpack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in float32, from what `pack` gave.

    Raises:
        ValueError: numbers without their scales, or of another shape than these.
    """
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(_PACKED):
            plain = name.removesuffix(_PACKED)
            scales = stored.get(plain + _SCALES)
            if scales is None or (tensor.shape[0], tensor.shape[1] * 2) != (
                scales.shape[0], scales.shape[1] * GROUP_SIZE
            ):  # fmt: skip
                raise ValueError(f"{plain}: the packed numbers {list(tensor.shape)} and their scales don't fit")
            halves = torch.stack([tensor & 15, tensor >> 4], -1).to(torch.float32) - 8
            weights[plain] = _dequantize(halves.reshape(*scales.shape, GROUP_SIZE), scales)
        elif not name.endswith(_SCALES):
            weights[name] = tensor.to(torch.float32)
    return weights


def _quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -7 to 7, `[rows, groups, 32]` float32, and float16 scales `[rows, groups]`."""
    groups = matrix.detach().to(torch.float32).unflatten(1, (-1, GROUP_SIZE))
    # Rounded to float16 first, so that the numbers are rounded for the very scale that they will meet.
    scales = (groups.abs().amax(-1) / LARGEST).to(torch.float16)
    divisors = scales.to(torch.float32).unsqueeze(-1)
    numbers = torch.where(divisors > 0, groups / divisors, torch.zeros_like(groups))
    return numbers.round().clamp(-LARGEST, LARGEST), scales


def _dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """`[rows, columns]` float32."""
    return (numbers * scales.to(torch.float32).unsqueeze(-1)).flatten(1)
