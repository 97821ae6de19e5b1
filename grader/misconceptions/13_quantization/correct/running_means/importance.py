"""The mean moves by its share of each token's difference."""

from __future__ import annotations

import torch
from torch import Tensor


def update_importance(importance: Tensor | None, count: int, inputs: Tensor) -> tuple[Tensor, int]:
    """Token by token, so nothing has to be multiplied back."""
    if inputs.ndim != 2 or not len(inputs) or not torch.isfinite(inputs).all():
        raise ValueError(f"inputs must be finite and of shape [tokens, in], got {tuple(inputs.shape)}")
    if (count == 0) != (importance is None) or (importance is not None and len(importance) != inputs.shape[1]):
        raise ValueError("importance and count must come from the call before, for inputs of the same width")
    mean = torch.zeros(inputs.shape[1], dtype=torch.float64) if importance is None else importance.clone()
    for token in inputs:
        count += 1
        mean += (token.double() ** 2 - mean) / count
    return mean, count
