"""One buffer per layer, tokens on the first axis and keys beside values; results are copies in the usual order."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.config import ModelConfig


class KVCache:
    """Keys and values in buffers `[capacity, 2, batch, kv_heads, head_dim]`."""

    def __init__(
        self, config: ModelConfig, capacity: int, batch_size: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        if type(capacity) is not int or capacity < 1 or type(batch_size) is not int or batch_size < 1:
            raise ValueError(
                f"capacity {capacity!r} and batch_size {batch_size!r} must be whole and at least 1"
            )
        if not dtype.is_floating_point:
            raise ValueError(f"numbers of dtype {dtype} can't be cached, take a floating point one")
        self._token_shape = (batch_size, config.num_kv_heads, config.head_dim)
        self._dtype = dtype
        self.capacity = capacity
        self._buffers = [
            torch.empty(capacity, 2, *self._token_shape, dtype=dtype) for _ in range(config.num_layers)
        ]
        self._ends = dict.fromkeys(range(config.num_layers), 0)

    @property
    def length(self) -> int:
        """Tokens that all layers have."""
        return min(self._ends.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Copies new tokens behind the old ones."""
        end = self._end(layer)
        for tensor in (k, v):
            if tensor.dim() != 4 or tensor.dtype != self._dtype:
                raise ValueError(f"give 4 axes of {self._dtype}, not {tensor.dim()} of {tensor.dtype}")
            batch, heads, count, channels = tensor.shape
            if (batch, heads, channels) != self._token_shape or count == 0 or count != k.shape[2]:
                raise ValueError(
                    f"shape {list(tensor.shape)} is not that of new tokens of {self._token_shape}"
                )
        room = self._buffers[layer][end:]
        if k.shape[2] > len(room):
            raise ValueError(f"{k.shape[2]} new tokens, but there is room for {len(room)}")
        for index in range(k.shape[2]):
            room[index, 0].copy_(k[:, :, index])
            room[index, 1].copy_(v[:, :, index])
        self._ends[layer] = end + k.shape[2]
        return self.keys(layer), self.values(layer)

    def keys(self, layer: int) -> Tensor:
        """A copy of a layer's keys."""
        end = self._end(layer)
        return self._buffers[layer][:end, 0].movedim(0, 2).clone()

    def values(self, layer: int) -> Tensor:
        """A copy of a layer's values."""
        end = self._end(layer)
        return self._buffers[layer][:end, 1].movedim(0, 2).clone()

    def truncate(self, length: int) -> None:
        """Moves every layer's end back."""
        if type(length) is not int or length not in range(self.length + 1):
            raise ValueError(f"can't keep {length!r} tokens of {self.length}")
        self._ends = dict.fromkeys(self._ends, length)

    def _end(self, layer: int) -> int:
        if type(layer) is not int or layer not in self._ends:
            raise ValueError(f"no layer {layer!r}, they are {list(self._ends)}")
        return self._ends[layer]
