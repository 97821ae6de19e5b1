"""Task 12e: a cache for multi-head latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.latent_config import LatentConfig


class LatentCache:
    """Latents and shared rotated key parts of the tokens seen so far, in memory that is allocated once.

    What `KVCache` of task 1 is for keys and values: a pass appends its new tokens layer by layer, and `length` is what
    every layer holds. There is no axis for heads: what is stored belongs to all of them.

    Args:
        config: sizes of the model's attention.
        capacity: the most tokens per sequence.
        batch_size: sequences, all of the same length.
        dtype: type of the stored numbers.

    Raises:
        ValueError: `capacity` or `batch_size` is not an int of at least 1, or `dtype` is not floating point.
    """

    def __init__(
        self, config: LatentConfig, capacity: int, batch_size: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        check_count("capacity", capacity, 1)
        check_count("batch_size", batch_size, 1)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point, got {dtype}")
        self._config = config
        self._capacity = capacity
        self._batch_size = batch_size
        self._dtype = dtype
        # BEGIN SOLUTION
        self._latents = torch.zeros(config.num_layers, batch_size, capacity, config.kv_lora_rank, dtype=dtype)
        self._rope_keys = torch.zeros(config.num_layers, batch_size, capacity, config.qk_rope_head_dim, dtype=dtype)
        self._held = [0] * config.num_layers
        # END SOLUTION

    @property
    def capacity(self) -> int:
        """The most tokens per sequence."""
        return self._capacity

    @property
    def length(self) -> int:
        """Tokens per sequence that every layer holds."""
        # BEGIN SOLUTION
        return min(self._held)
        # END SOLUTION

    @property
    def num_bytes(self) -> int:
        """Bytes of memory set aside, used or not, measured on the tensors themselves."""
        # BEGIN SOLUTION
        return sum(t.numel() * t.element_size() for t in (self._latents, self._rope_keys))
        # END SOLUTION

    def append(self, layer: int, latents: Tensor, rope_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Store the latents and shared key parts of new tokens behind those that the layer holds.

        Args:
            layer: 0 for the first decoder layer.
            latents: `[batch, new_tokens, kv_lora_rank]`, normalised, in the cache's dtype.
            rope_keys: `[batch, new_tokens, qk_rope_head_dim]`, rotated by their positions already, same dtype.

        Returns:
            Those of all tokens that the layer now holds, old ones first: `[batch, tokens, kv_lora_rank]` and
            `[batch, tokens, qk_rope_head_dim]`. Views are allowed; the result is only read.

        Raises:
            ValueError: layer, shape or dtype is wrong, or the new tokens don't fit. The cache is then as it was before.
        """
        self._check_new_tokens(layer, latents, rope_keys)
        # BEGIN SOLUTION
        start, end = self._held[layer], self._held[layer] + latents.shape[1]
        if end > self._capacity:
            raise ValueError(
                f"layer {layer} holds {start} tokens and {latents.shape[1]} more would make {end}, but the capacity is "
                f"{self._capacity}"
            )
        self._latents[layer, :, start:end] = latents
        self._rope_keys[layer, :, start:end] = rope_keys
        self._held[layer] = end
        return self._latents[layer, :, :end], self._rope_keys[layer, :, :end]
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`, in every layer.

        Raises:
            ValueError: `length` is no int from 0 to the present length. The cache is then as it was before.
        """
        check_count("length", length, 0)
        # BEGIN SOLUTION
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens held, got {length}")
        self._held = [length] * len(self._held)
        # END SOLUTION

    def _check_new_tokens(self, layer: int, latents: Tensor, rope_keys: Tensor) -> None:
        """Refuse a layer that the model doesn't have, and tensors of another shape or dtype than is stored."""
        count = self._config.num_layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise ValueError(f"layer must be an int from 0 to {count - 1}, got {layer!r}")
        widths = {"latents": self._config.kv_lora_rank, "rope_keys": self._config.qk_rope_head_dim}
        new = latents.shape[1] if latents.dim() == 3 else 0
        for (name, width), tensor in zip(widths.items(), (latents, rope_keys), strict=True):
            wanted = (self._batch_size, new, width)
            if new < 1 or tuple(tensor.shape) != wanted or tensor.dtype != self._dtype:
                raise ValueError(
                    f"{name} must be {self._dtype} of shape [batch={self._batch_size}, new_tokens>=1, {width}], with "
                    f"as many tokens in both, got {tensor.dtype} {list(tensor.shape)}"
                )
