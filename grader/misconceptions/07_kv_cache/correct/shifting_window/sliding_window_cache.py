"""No ring: tokens lie in order, and move to the front when older ones leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.checks import check_count


class _Layer:
    """The last tokens of one layer, from position `start` on."""

    def __init__(self, window: int, room: int, heads: int, width: int, dtype: torch.dtype) -> None:
        self.window, self.room = window, room
        self.keys, self.values = (torch.empty(1, heads, room, width, dtype=dtype) for _ in range(2))
        self.start = self.count = 0

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.count

    def least(self) -> int:
        """The shortest length, but 0, that can be gone back to."""
        return self.start + self.window - 1 if self.start else 0

    def cut(self, length: int) -> None:
        """Forget positions from there on."""
        self.count = length - self.start if length else 0
        self.start = self.start if length else 0

    def append(self, *new: Tensor) -> list[Tensor]:
        """Everything old and new in a row; then as much of it as there is room for."""
        old = min(self.count, self.window - 1)
        rows = [torch.cat((t[:, :, : self.count], n), 2) for t, n in zip((self.keys, self.values), new, strict=True)]
        total, end = self.count + new[0].shape[2], self.end + new[0].shape[2]
        seen = [row[:, :, self.count - old :] for row in rows]
        self.count = min(total, self.room)
        for memory, row in zip((self.keys, self.values), rows, strict=True):
            memory[:, :, : self.count] = row[:, :, total - self.count :]
        self.start = end - self.count
        return seen


class SlidingWindowCache:
    """One such layer each."""

    def __init__(
        self,
        config: Any,
        windows: Sequence[int | None],
        capacity: int,
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_count("capacity", capacity, 1)
        check_count("slack", slack, 0)
        if len(windows) != config.num_layers or not dtype.is_floating_point:
            raise ValueError(f"{len(windows)} windows for {config.num_layers} layers, in {dtype}")
        self.capacity, self.shape, self.dtype = capacity, (1, config.num_kv_heads, config.head_dim), dtype
        self.layers: list[_Layer] = []
        for window in windows:
            check_count("window", 1 if window is None else window, 1)
            room = capacity if window is None else min(capacity, window + slack)
            self.layers.append(_Layer(window or capacity, room, config.num_kv_heads, config.head_dim, dtype))

    @property
    def length(self) -> int:
        """Of the layer that has seen least."""
        return min(layer.end for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Of both halves."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """To one layer."""
        if type(layer) is not int or not 0 <= layer < len(self.layers):
            raise ValueError(f"there is no layer {layer!r}")
        for tensor in (k, v):
            fits = tensor.dim() == 4 and (*tensor.shape[:2], tensor.shape[3]) == self.shape and tensor.shape[2] > 0
            if not fits or tensor.dtype != self.dtype or k.shape != v.shape:
                raise ValueError(f"can't store {tensor.dtype} {list(tensor.shape)}")
        if self.layers[layer].end + k.shape[2] > self.capacity:
            raise ValueError(f"only {self.capacity - self.layers[layer].end} more tokens fit")
        keys, values = self.layers[layer].append(k, v)
        return keys, values

    def truncate(self, length: int) -> None:
        """All layers or none."""
        check_count("length", length, 0)
        least = max(layer.least() for layer in self.layers)
        if length > self.length or 0 < length < least:
            raise ValueError(f"can go back to {least} or more of {self.length} tokens, or to 0, not to {length}")
        for layer in self.layers:
            layer.cut(length)
