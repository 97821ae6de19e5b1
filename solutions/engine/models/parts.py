"""Parts that models are made of, and what they compute row by row: the seam for fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from .rotation import Rotation


class RowOps(Protocol):
    """What a token needs no other token for, products aside."""

    def norm(self, hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
        """RMSNorm of each row of `[tokens, hidden]`."""

    def add_norm(self, delta: Tensor, hidden: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """RMSNorm of `delta + hidden`, and that sum."""

    def rotation(self, positions: Tensor, frequencies: Tensor, gain: float) -> Rotation:
        """RoPE for the tokens of a step."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) · up`, all `[tokens, width]`."""


class TorchRows:
    """`RowOps` as torch has them."""

    def norm(self, hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
        """See `RowOps`."""
        return rms_norm(hidden, gain, eps)

    def add_norm(self, delta: Tensor, hidden: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `RowOps`."""
        hidden = hidden + delta
        return rms_norm(hidden, gain, eps), hidden

    def rotation(self, positions: Tensor, frequencies: Tensor, gain: float) -> Rotation:
        """See `RowOps`."""
        return Rotation(positions, frequencies, gain)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `RowOps`."""
        return F.silu(gate) * up


class Part:
    """A part of a model. Attributes that are parts, or lists of parts, belong to it."""

    reads_back: ClassVar[bool] = False
    """Whether computing it waits for numbers of the device, so that what it launches depends on them."""

    _rows: RowOps = TorchRows()

    def parts(self) -> Iterator[tuple[str, Part | list[Part]]]:
        """Those that belong to it, by attribute."""
        for name, value in vars(self).items():
            if isinstance(value, Part) or (isinstance(value, list) and value and isinstance(value[0], Part)):
                yield name, value

    @property
    def is_static(self) -> bool:
        """Whether what is launched depends on shapes alone, here and in all parts."""
        inner = [part for _, value in self.parts() for part in (value if isinstance(value, list) else [value])]
        return not self.reads_back and all(part.is_static for part in inner)

    def with_rows(self, rows: RowOps) -> Self:
        """A copy on the same weights that computes rows in another way."""
        twin = copy(self)
        twin._rows = rows
        for name, value in self.parts():
            changed = [part.with_rows(rows) for part in value] if isinstance(value, list) else value.with_rows(rows)
            setattr(twin, name, changed)
        return twin


def rms_norm(hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Each row by the root of its mean square, in at least float32, then rounded to its type, then scaled."""
    if hidden.dtype == gain.dtype == torch.float32:  # nothing is rounded between, so one call does it all
        return F.rms_norm(hidden, hidden.shape[-1:], gain, eps)
    wide = F.rms_norm(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), hidden.shape[-1:], None, eps)
    return wide.to(hidden.dtype) * gain
