"""RoPE for the tokens of one step: sines and cosines once, for all layers and all heads."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotation:
    """Turns the pairs (i, i + head_dim/2) of heads by the angles of their tokens' places.

    With x' the two halves of a head swapped, the turned head is x · (cos, cos) + x' · (−sin, sin): three operations on
    whole heads, where turning half by half takes seven on pieces. A decode step is made of calls so small that their
    number is what counts.

    Args:
        positions: of each token in its own text, int64 `[tokens]`.
        frequencies: angle that a position adds to each pair, in radians, `[head_dim / 2]`.
        gain: factor on cosines and sines.

    Source: Su et al. 2021 (2104.09864).
    """

    def __init__(self, positions: Tensor, frequencies: Tensor, gain: float = 1.0) -> None:
        angles = positions[:, None, None].to(torch.float32) * frequencies
        cos, sin = gain * angles.cos(), gain * angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1)
        self._sin = torch.cat((-sin, sin), dim=-1)

    def __call__(self, heads: Tensor) -> Tensor:
        """`[tokens, heads, head_dim]`, turned; computed in at least float32 and rounded once."""
        # Lower precisions are promoted by the product with float32.
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        turned = torch.addcmul(heads * self._cos, swapped, self._sin)
        return turned if turned.dtype == heads.dtype else turned.to(heads.dtype)
