"""Folding feature by feature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def fold_scales(
    producers: Sequence[Tensor], weights: Sequence[Tensor], scales: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """One feature after another: its row in all producers, its column in all weights."""
    producers, weights = list(producers), list(weights)
    if not producers or not weights:
        raise ValueError("producers and weights must not be empty")
    if scales.dim() != 1:
        raise ValueError(f"scales must be [in], got {list(scales.shape)}")
    numbers = scales.tolist()
    for index, number in enumerate(numbers):
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"scales[{index}] must be finite and above 0, got {number}")
    for name, tensors, axis in (("producers", producers, 0), ("weights", weights, -1)):
        for index, tensor in enumerate(tensors):
            if tensor.shape[axis] != len(numbers):
                raise ValueError(f"{name}[{index}] has {tensor.shape[axis]} features, there are {len(numbers)} scales")
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name}[{index}] must be finite")
    made = [tensor.to(torch.float64, copy=True) for tensor in producers]
    read = [tensor.to(torch.float64, copy=True) for tensor in weights]
    for feature, number in enumerate(numbers):
        for tensor in made:
            tensor[feature] /= number
        for tensor in read:
            tensor[:, feature] *= number
    return (
        tuple(new.to(old.dtype) for new, old in zip(made, producers, strict=True)),
        tuple(new.to(old.dtype) for new, old in zip(read, weights, strict=True)),
    )
