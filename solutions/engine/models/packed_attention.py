"""What a model asks of attention, and latent attention of a model: the seam between families and paged memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LatentMaps(Protocol):
    """Between the heads of a layer and the one latent that it keeps of a token; see `latent_attention`."""

    scale: float
    v_head_dim: int

    def is_absorbed(self, num_queries: int, num_keys: int) -> bool:
        """Whether so many queries had better go to the latents than so many latents to the queries."""

    def absorb(self, q: Tensor) -> Tensor:
        """Queries `[queries, heads, qk_head_dim]` as they meet latents, `[queries, heads, latent_dim]`."""

    def read_out(self, read: Tensor) -> Tensor:
        """Sums of values `[queries, heads, v_head_dim]`, from those of latents `[queries, heads, latent_dim]`."""

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, `[keys, heads, …]`, from latents `[keys, 1, latent_dim]`."""


class PackedAttention(Protocol):
    """Attention over the tokens of all requests of a step; called by each layer once."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Stores keys and values, then lets the queries read.

        Args:
            layer: 0 for the first.
            q: `[tokens, heads, head_dim]`.
            k: `[tokens, kv_heads, head_dim]`.
            v: as `k`.
            window: newest tokens that a query sees, its own included; None means all.

        Returns:
            What each query reads, `[tokens, heads, head_dim]`.
        """

    def latent(self, layer: int, q: Tensor, latents: Tensor, maps: LatentMaps) -> Tensor:
        """Stores latents `[tokens, 1, latent_dim]`, then lets `q`, `[tokens, heads, qk_head_dim]`, read values
        `[tokens, heads, v_head_dim]` made from them."""
