"""What a model computes row by row, by the fused kernels of lab 06."""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.kernels.rms_norm import add_rms_norm
from solutions.kernels.rope import apply_rope
from solutions.kernels.swiglu import swiglu


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

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowOps`: of tables that have a row for each token, token i reads row i."""
        # Contiguous, whatever q and k are: attention reads them token by token.
        turned = [torch.empty(heads.shape, dtype=heads.dtype, device=heads.device) for heads in (q, k)]
        (q, k), out = ([heads.transpose(0, 1)[None] for heads in pair] for pair in ((q, k), turned))
        rows = torch.arange(len(cos), device=cos.device)[None]
        apply_rope(q, k, cos[:, 0], sin[:, 0], rows, out=(out[0], out[1]))
        return turned[0], turned[1]

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `RowOps`."""
        return swiglu(gate, up)
