"""Task 1b: a preallocated KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.config import ModelConfig


class KVCache:
    """Keys and values of the tokens seen so far, in memory that is allocated once.

    One forward pass appends its new tokens layer by layer: layer 0 first, the last layer last. Between two
    passes every layer holds the same number of tokens, and that number is `length`. *During* a pass the first
    layers are ahead of the others; `length` is then what every layer holds already.

    The cache is filled from the front. What lies behind the valid tokens is unused memory and is never returned.

    Args:
        config: shape of the model.
        capacity: the most tokens per sequence.
        batch_size: sequences, all of the same length.
        dtype: type of the stored numbers.

    Raises:
        ValueError: `capacity` or `batch_size` is not an int of at least 1, or `dtype` is not floating point.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, batch_size: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        for name, value in (("capacity", capacity), ("batch_size", batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point, got {dtype}")
        self._config = config
        self._capacity = capacity
        self._batch_size = batch_size
        self._dtype = dtype
        # BEGIN SOLUTION
        shape = (config.num_layers, batch_size, config.num_kv_heads, capacity, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype)
        self._values = torch.zeros(shape, dtype=dtype)
        # Tokens held by each layer: they differ only while a forward pass is under way.
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
        """Bytes of memory set aside for keys and values, used or not, measured on the tensors themselves."""
        # BEGIN SOLUTION
        return sum(t.numel() * t.element_size() for t in (self._keys, self._values))
        # END SOLUTION

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens behind those that the layer holds.

        Args:
            layer: 0 for the first decoder layer.
            k: keys `[batch, kv_heads, new_tokens, head_dim]`, in the cache's dtype.
            v: values, same shape and dtype.

        Returns:
            Keys and values of all tokens the layer now holds, old ones first: two tensors
            `[batch, kv_heads, tokens, head_dim]`. Views of the cache are allowed; the result is only read.

        Raises:
            ValueError: layer, shape or dtype is wrong, or the new tokens don't fit into what is left of the
                capacity. The cache is then as it was before the call.
        """
        self._check_layer(layer)
        self._check_new_tokens(k, v)
        # BEGIN SOLUTION
        start = self._held[layer]
        end = start + k.shape[2]
        if end > self._capacity:
            raise ValueError(
                f"layer {layer} holds {start} tokens and {k.shape[2]} more would make {end}, but the capacity is "
                f"{self._capacity}; truncate the cache or build a larger one"
            )
        self._keys[layer, :, :, start:end] = k
        self._values[layer, :, :, start:end] = v
        self._held[layer] = end
        return self.keys(layer), self.values(layer)
        # END SOLUTION

    def keys(self, layer: int) -> Tensor:
        """Keys of the tokens that a layer holds.

        Args:
            layer: 0 for the first decoder layer.

        Returns:
            `[batch, kv_heads, tokens, head_dim]`, oldest token first.

        Raises:
            ValueError: there is no such layer.
        """
        self._check_layer(layer)
        # BEGIN SOLUTION
        return self._keys[layer, :, :, : self._held[layer]]
        # END SOLUTION

    def values(self, layer: int) -> Tensor:
        """Values of the tokens that a layer holds; arguments, result and errors as for `keys`."""
        self._check_layer(layer)
        # BEGIN SOLUTION
        return self._values[layer, :, :, : self._held[layer]]
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`, in every layer.

        The memory stays allocated and the tokens kept stay in place. A pass that was broken off half-way leaves
        some layers ahead of the others: `truncate(cache.length)` makes them equal again.

        Args:
            length: tokens per sequence to keep; 0 empties the cache.

        Raises:
            ValueError: `length` is negative, no int, or more than every layer holds (`self.length`): a cache
                can't be truncated to tokens it has never seen. The cache is then as it was before the call.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ValueError(f"length must be an int of at least 0, got {length!r}")
        # BEGIN SOLUTION
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens held, got {length}")
        self._held = [length] * self._config.num_layers
        # END SOLUTION

    def _check_layer(self, layer: int) -> None:
        """Refuse a layer that the model doesn't have; negative indices don't count from the end here."""
        count = self._config.num_layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise ValueError(f"layer must be an int from 0 to {count - 1}, got {layer!r}")

    def _check_new_tokens(self, k: Tensor, v: Tensor) -> None:
        """Refuse keys or values of another shape or dtype than the cache stores."""
        wanted = (self._batch_size, self._config.num_kv_heads, self._config.head_dim)
        for name, tensor in (("k", k), ("v", v)):
            shape = tuple(tensor.shape)
            if len(shape) != 4 or (shape[0], shape[1], shape[3]) != wanted or shape[2] < 1:
                raise ValueError(
                    f"{name} must have shape [batch={wanted[0]}, kv_heads={wanted[1]}, new_tokens>=1, "
                    f"head_dim={wanted[2]}], got {list(shape)}"
                )
            if tensor.dtype != self._dtype:
                raise ValueError(f"{name} must have the cache's dtype {self._dtype}, got {tensor.dtype}")
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"k has {k.shape[2]} new tokens and v has {v.shape[2]}; they must be equal")
