"""One tensor, latent and key part side by side, as kernels like it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.checks import check_count


class LatentCache:
    """Rows of rank + rope numbers."""

    def __init__(self, config: Any, capacity: int, batch_size: int = 1, dtype: torch.dtype = torch.float32) -> None:
        check_count("capacity", capacity, 1)
        check_count("batch_size", batch_size, 1)
        if not dtype.is_floating_point:
            raise ValueError(f"{dtype} has no fractions")
        self.widths = [config.kv_lora_rank, config.qk_rope_head_dim]
        self.rows = torch.empty(batch_size, config.num_layers, capacity, sum(self.widths), dtype=dtype)
        self.ends = torch.zeros(config.num_layers, dtype=torch.int64)

    @property
    def capacity(self) -> int:
        """Rows of a layer."""
        return self.rows.shape[2]

    @property
    def length(self) -> int:
        """Of the shortest layer."""
        return int(self.ends.min())

    @property
    def num_bytes(self) -> int:
        """Of the one tensor."""
        return self.rows.nbytes

    def append(self, layer: int, latents: Tensor, rope_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Joins, writes, and splits again."""
        if type(layer) is not int or layer not in range(len(self.ends)):
            raise ValueError(f"there is no layer {layer!r}")
        for tensor, width in zip((latents, rope_keys), self.widths, strict=True):
            if tensor.dim() != 3 or tensor.dtype != self.rows.dtype or tensor.shape[2] != width:
                raise ValueError(f"{tensor.dtype} {list(tensor.shape)} has not the width {width}")
        if latents.shape[:2] != rope_keys.shape[:2] or len(latents) != len(self.rows) or latents.shape[1] == 0:
            raise ValueError(f"{list(latents.shape)} and {list(rope_keys.shape)} are not of the same new tokens")
        start = int(self.ends[layer])
        if start + latents.shape[1] > self.capacity:
            raise ValueError(f"{self.capacity - start} more tokens fit, not {latents.shape[1]}")
        self.rows[:, layer, start : start + latents.shape[1]] = torch.cat((latents, rope_keys), dim=2)
        self.ends[layer] += latents.shape[1]
        held = self.rows[:, layer, : int(self.ends[layer])].clone()
        first, second = held.split(self.widths, dim=2)
        return first, second

    def truncate(self, length: int) -> None:
        """All layers."""
        check_count("length", length, 0)
        if length > self.length:
            raise ValueError(f"{length} tokens were never held by every layer")
        self.ends[:] = length
