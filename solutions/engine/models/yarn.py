"""YaRN: RoPE stretched to a longer context, slow pairs more than fast ones, and scores sharpened to make up for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.checks import check_count


@dataclass(frozen=True)
class Yarn:
    """How far RoPE is stretched.

    Args:
        factor: how many times longer the context becomes, at least 1.
        original_context: tokens of the first training.
        beta_fast: pairs that turn more often than this in the original context keep their frequency.
        beta_slow: pairs that turn less often are slowed down by `factor`; those in between by less.
        mscale: how much rotated parts grow with the logarithm of `factor`; 0 means as in the paper.
        mscale_all_dim: how much of that is meant for whole heads, and goes into the scale of the scores instead.

    Raises:
        ValueError: a number out of range.

    Source: Peng et al. 2023 (2309.00071), sections 3.2 to 3.4.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        check_count("original_max_position_embeddings", self.original_context, 1)
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"YaRN's factor must be a finite number of at least 1, got {self.factor}")
        if not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(f"YaRN needs 0 < beta_slow < beta_fast, got {self.beta_slow} and {self.beta_fast}")
        for name in ("mscale", "mscale_all_dim"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"YaRN's {name} must be a finite number of at least 0, got {getattr(self, name)}")

    @property
    def rope_gain(self) -> float:
        """Factor on cosines and sines."""
        if self.mscale and self.mscale_all_dim:
            return self._gain(self.mscale) / self._gain(self.mscale_all_dim)
        return self._gain(1.0)

    @property
    def score_gain(self) -> float:
        """Factor on the scores of whole heads: queries and keys have it once each."""
        return self._gain(self.mscale_all_dim) ** 2

    def _gain(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


def yarn_frequencies(yarn: Yarn, theta: float, head_dim: int) -> Tensor:
    """The angle that one position adds to each pair, `[head_dim / 2]` float32, in radians.

    Args:
        yarn: how far RoPE is stretched.
        theta: base of the frequencies.
        head_dim: numbers that are turned.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    # Pair i turns original_context * theta^(-2i / head_dim) / 2π times; these are the i of beta_fast and beta_slow.
    fast, slow = (
        head_dim * math.log(yarn.original_context / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    first, last = max(math.floor(fast), 0), min(math.ceil(slow), head_dim - 1)
    # Where both are one pair, a step between it and the next stands for the ramp.
    slowed = ((torch.arange(head_dim // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / yarn.factor * slowed
