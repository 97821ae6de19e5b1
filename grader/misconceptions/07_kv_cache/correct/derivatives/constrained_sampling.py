"""Starts from rows where nothing is possible, and copies in what is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .token_mask import TokenConstraint


def mask_logits(logits: Tensor, masks: Tensor) -> Tensor:
    """Row by row."""
    if logits.dim() != 2 or not logits.is_floating_point() or masks.dtype != torch.bool or masks.shape != logits.shape:
        raise ValueError(f"logits {list(logits.shape)} and masks {list(masks.shape)} of {masks.dtype} don't fit")
    result = torch.full_like(logits, float("-inf"))
    for row in range(len(logits)):
        allowed = masks[row]
        result[row][allowed] = logits[row][allowed]
        if not any(value != float("-inf") for value in result[row][allowed].tolist()):
            raise ValueError(f"nothing can be drawn from row {row}")
    return result


class ConstrainedSampler:
    """Tries the token on the constraint before it is handed on."""

    def __init__(self, choose: Callable[[Tensor, int], int], constraint: TokenConstraint) -> None:
        self.choose, self.constraint = choose, constraint

    def __call__(self, logits: Tensor, step: int) -> int:
        """One row only."""
        if logits.dim() != 1:
            raise ValueError(f"one row of logits is wanted, got {list(logits.shape)}")
        token = self.choose(mask_logits(logits[None], self.constraint.mask()[None]).flatten(), step)
        self.constraint.advance(token)
        return token
