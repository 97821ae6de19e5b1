"""What a model computes row by row, by the fused kernels of lab 06."""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.kernels.rms_norm import add_rms_norm
from solutions.kernels.rope import apply_rope
from solutions.kernels.swiglu import swiglu

from ..models.rotation import Rotation


class KernelRotation(Rotation):
    """Turns all heads of queries and keys in one launch."""

    def __init__(self, positions: Tensor, frequencies: Tensor, gain: float) -> None:
        angles = positions[:, None].to(torch.float32) * frequencies
        self._cosines, self._sines = gain * angles.cos(), gain * angles.sin()
        # The tables have a row for each token: token i reads row i.
        self._rows = torch.arange(len(positions), device=positions.device)[None]

    def __call__(self, heads: Tensor) -> Tensor:
        """See `Rotation`. The kernel is made for two sets of heads, which may be any two parts of one."""
        turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        (q, k), out = (one.transpose(0, 1)[None].tensor_split([1], dim=1) for one in (heads, turned))
        apply_rope(q, k, self._cosines, self._sines, self._rows, out=(out[0], out[1]))
        return turned


class KernelRows:
    """`models.parts.RowOps`: one launch each, where torch has three to seven.

    Args:
        dtype: of activations.
        device: where they lie.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._nothing = torch.zeros((), dtype=dtype, device=device)

    def norm(self, hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
        """See `RowOps`: a row to which nothing is added."""
        return self.add_norm(hidden, self._nothing.expand_as(hidden), gain, eps)[0]

    def add_norm(self, delta: Tensor, hidden: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `RowOps`."""
        return add_rms_norm(delta, hidden, gain, eps)

    def rotation(self, positions: Tensor, frequencies: Tensor, gain: float) -> KernelRotation:
        """See `RowOps`."""
        return KernelRotation(positions, frequencies, gain)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `RowOps`."""
        return swiglu(gate, up)
