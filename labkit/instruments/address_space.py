"""Made-up addresses for the tensor arguments of a kernel, so that each pointer tells where it came from.

Real addresses don't: a load past the end of one tensor may land in the next, and looks as right as any. Here every
argument gets a stretch of 2⁵⁰ bytes to itself, in the middle of which it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from labkit.instruments.access_log import TensorTraffic
from labkit.storage import View

_STRETCH_BITS = 50
_MIDDLE = 1 << (_STRETCH_BITS - 1)
_PAGE = 4096
"""Alignment of the real address that the made-up one keeps."""

Array = np.ndarray

TRAFFIC = ("bytes_loaded", "bytes_stored", "unmasked_loads", "unmasked_stores")
"""What is counted of each tensor."""


@dataclass
class Region:
    """One tensor argument of a launch: where it seems to lie, where it does, and what went to and fro."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_up: int
    real: int
    num_bytes: int
    covered: Array | None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRAFFIC, 0))

    def stray(self, addresses: Array, itemsize: int) -> Array:
        """Which of the addresses, each of `itemsize` bytes, are not the tensor's own."""
        first = (addresses - np.uint64(self.made_up)).astype(np.int64)
        outside = (first < 0) | (first > self.num_bytes - itemsize)
        if self.covered is not None:
            inside = np.where(outside, 0, first)
            outside |= ~(self.covered[inside] & self.covered[inside + itemsize - 1])
        return outside

    def offsets(self, addresses: Array) -> Array:
        """Positions in elements from the tensor's first one."""
        return (addresses - np.uint64(self.made_up)).astype(np.int64) // self.dtype.itemsize

    def to_real(self, addresses: Array) -> Array:
        """Where the bytes are."""
        return addresses - np.uint64(self.made_up) + np.uint64(self.real)

    def traffic(self) -> TensorTraffic:
        """What was counted, as a fact."""
        return TensorTraffic(self.name, self.shape, self.dtype, **self.counts)


class AddressSpace:
    """The tensor arguments of one launch."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, name: str, tensor: Tensor) -> Region:
        """Gives a tensor its stretch."""
        size = tensor.element_size()
        view = View(tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)
        span = view.end
        covered = None
        if tensor.numel() < span:
            marks = torch.zeros(span * size, dtype=torch.uint8)
            view.mark(marks)
            covered = marks.bool().numpy()
        real = tensor.data_ptr()
        made_up = ((len(self.regions) + 1) << _STRETCH_BITS) + _MIDDLE + real % _PAGE
        region = Region(name, tuple(tensor.shape), tensor.dtype, made_up, real, span * size, covered)
        self.regions.append(region)
        return region

    def split(self, addresses: Array, lanes: Array) -> Iterator[tuple[Region | None, Array]]:
        """The tensors that an access goes to, and which lanes go to each.

        Args:
            addresses: of all lanes.
            lanes: those that the mask lets through.

        Yields:
            A tensor and its lanes, a mask of the shape of `lanes`; None for numbers that never were a pointer.
        """
        active = addresses[lanes] >> np.uint64(_STRETCH_BITS)
        if active.size == 0:
            return
        if active.min() == active.max():
            yield self._region(int(active[0])), lanes.copy()
            return
        stretches = addresses >> np.uint64(_STRETCH_BITS)
        for stretch in np.unique(active):
            yield self._region(int(stretch)), lanes & (stretches == stretch)

    def _region(self, stretch: int) -> Region | None:
        return self.regions[stretch - 1] if 1 <= stretch <= len(self.regions) else None


def distinct(addresses: Array, itemsize: int) -> int:
    """How many different addresses there are: lanes that ask for the same one are served together."""
    if addresses.size < 2:
        return int(addresses.size)
    low = addresses.min()
    places = ((addresses - low) // np.uint64(itemsize)).astype(np.int64)
    width = int(places.max()) + 1
    if width > 16 * addresses.size:
        return int(np.unique(addresses).size)
    seen = np.zeros(width, dtype=bool)
    seen[places] = True
    return int(seen.sum())
