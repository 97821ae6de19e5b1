"""Task 12b: a KV cache that keeps of each layer only the tokens in its window, in a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.config import ModelConfig


class SlidingWindowCache:
    """A KV store whose windowed layers never grow beyond their window.

    A layer with window w keeps its last w tokens: the token at position p lies at place p % w, where it takes the
    place of the token at position p - w, which nobody sees any more. Positions stay absolute: `length` counts all
    tokens of the sequence, kept or not.

        window 4, after 6 tokens        place     0  1  2  3
                                        position  4  5  2  3

    What is overwritten can't come back, so `truncate` has limits. The next token after a truncation to n sees the
    tokens from n - w + 1 on: they must all still be there. With rings of w places one token can be taken back; `slack`
    adds places, and as many more tokens that can be taken back, as a drafter needs.

    As in task 1, a pass appends its new tokens layer by layer, and `length` is what every layer has seen.

    Args:
        config: shape of the model.
        windows: for each layer the tokens that a query sees, its own included; None sees all.
        capacity: the most tokens of a sequence; layers without a window reserve memory for all of them.
        slack: places beyond the window in each ring.
        dtype: type of the stored numbers.

    Raises:
        ValueError: not one window for each layer, a number that is no int or too small, or no floating point dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        windows: Sequence[int | None],
        capacity: int,
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_count("capacity", capacity, 1)
        check_count("slack", slack, 0)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point, got {dtype}")
        if len(windows) != config.num_layers:
            raise ValueError(f"windows must name one for each of the {config.num_layers} layers, got {len(windows)}")
        for layer, window in enumerate(windows):
            if window is not None:
                check_count(f"windows[{layer}]", window, 1)
        self._config = config
        self._capacity = capacity
        self._dtype = dtype
        # Without a window a layer sees, and so keeps, whatever fits.
        self._windows = [capacity if window is None else window for window in windows]
        # BEGIN SOLUTION
        self._rings = [
            torch.zeros(2, config.num_kv_heads, min(window + slack, capacity), config.head_dim, dtype=dtype)
            for window in self._windows
        ]
        # Of each layer the positions in its ring: from `first` to just before `end`.
        self._first = [0] * config.num_layers
        self._end = [0] * config.num_layers
        # END SOLUTION

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence."""
        return self._capacity

    @property
    def length(self) -> int:
        """Tokens of the sequence that every layer has seen, kept or not."""
        # BEGIN SOLUTION
        return min(self._end)
        # END SOLUTION

    @property
    def num_bytes(self) -> int:
        """Bytes of memory set aside for keys and values, used or not, measured on the tensors themselves."""
        # BEGIN SOLUTION
        return sum(ring.numel() * ring.element_size() for ring in self._rings)
        # END SOLUTION

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, and give up those that leave the window.

        Args:
            layer: 0 for the first decoder layer.
            k: keys `[1, kv_heads, new_tokens, head_dim]` in the cache's dtype; more new tokens than the window are
                allowed.
            v: values, same shape and dtype.

        Returns:
            Keys and values that the new tokens see, oldest first: all new ones, and before them the last window - 1
            that the layer held, or as many as there were. Two tensors `[1, kv_heads, tokens, head_dim]`.

        Raises:
            ValueError: layer, shape or dtype is wrong, or the sequence would pass the capacity. The cache is then as it
                was before the call.
        """
        self._check_new_tokens(layer, k, v)
        # BEGIN SOLUTION
        ring, start, end = self._rings[layer], self._end[layer], self._end[layer] + k.shape[2]
        if end > self._capacity:
            raise ValueError(
                f"layer {layer} has seen {start} tokens and {k.shape[2]} more would make {end}, but the capacity is "
                f"{self._capacity}"
            )
        places = ring.shape[2]
        seen = torch.arange(max(0, start - self._windows[layer] + 1), start) % places
        new = torch.stack((k[0], v[0]))
        # Read before writing: a chunk may overwrite what its own first tokens see.
        keys, values = torch.cat((ring[:, :, seen], new), dim=2).unsqueeze(1)
        kept = min(places, k.shape[2])
        ring[:, :, torch.arange(end - kept, end) % places] = new[:, :, -kept:]
        self._first[layer] = max(self._first[layer], end - places)
        self._end[layer] = end
        return keys, values
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`, in every layer.

        Possible as far as each layer still holds what the next token will see; 0 always is. A pass that was broken off
        after more new tokens than can be taken back leaves nothing but that.

        Args:
            length: tokens of the sequence to keep.

        Raises:
            ValueError: `length` is no int from 0 to the present length, or a layer has given up tokens that the next
                one would see; the message says how far back is possible. The cache is then as it was before the call.
        """
        check_count("length", length, 0)
        # BEGIN SOLUTION
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens seen, got {length}")
        least = max(
            first + window - 1 if first else 0 for first, window in zip(self._first, self._windows, strict=True)
        )
        if 0 < length < least:
            raise ValueError(
                f"can't truncate to {length} tokens: some that the next one would see are overwritten. Truncate to at "
                f"least {least}, or to 0 and read the tokens again; more slack lets more be taken back"
            )
        self._end = [length] * len(self._end)
        if length == 0:
            self._first = [0] * len(self._first)
        # END SOLUTION

    def _check_new_tokens(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Refuse a layer that the model doesn't have, and keys or values of another shape or dtype than is stored."""
        count = self._config.num_layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise ValueError(f"layer must be an int from 0 to {count - 1}, got {layer!r}")
        heads, width = self._config.num_kv_heads, self._config.head_dim
        for name, tensor in (("k", k), ("v", v)):
            new = tensor.shape[2] if tensor.dim() == 4 else 0
            if new < 1 or tuple(tensor.shape) != (1, heads, new, width) or tensor.dtype != self._dtype:
                raise ValueError(
                    f"{name} must be {self._dtype} of shape [1, kv_heads={heads}, new_tokens>=1, head_dim={width}], "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
        if k.shape != v.shape:
            raise ValueError(f"k has {k.shape[2]} new tokens and v has {v.shape[2]}; they must be equal")
