"""What a model keeps of each token; pools allocate by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVShape:
    """What a model keeps of each token, in each layer.

    Args:
        num_layers: that keep anything.
        num_parts: tensors side by side: 2 for keys and values, 1 for a latent that both are made from.
        num_heads: heads in a part.
        head_dim: numbers in a head.
    """

    num_layers: int
    num_parts: int
    num_heads: int
    head_dim: int
