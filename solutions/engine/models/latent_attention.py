"""Multi-head latent attention (MLA): one latent is all that is kept of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.latent_config import LatentConfig
from solutions.kv_cache.latent import latent_attention_flops
from solutions.kv_cache.latent_attention import split_kv_projection

from .blocks import Weights, joined, same_kind
from .packed_attention import PackedAttention
from .parts import rms_norm
from .rotation import Rotation

_LATENT_NORM_EPS = 1e-6
"""The norms of latents have an epsilon of their own, whatever `rms_norm_eps` says."""


class LatentAttention:
    """Attention that keeps a latent and one rotated key part of a token, for all heads together.

    RoPE turns neighbours here, (0, 1), (2, 3), …, where other families turn (i, i + half). Rows of the projections that
    make the turned parts are sorted once, for queries and keys alike: their products stay what they were.

    Args:
        sizes: of the attention.
        weights: of the model.
        name: of the layer's attention among them.
        q_lora_rank: width that queries are squeezed through; None if they are not.
        score_gain: factor on the scores.

    Source: DeepSeek-AI 2024 (2405.04434), section 2.1; module section 1.3.
    """

    window: int | None = None

    def __init__(
        self, sizes: LatentConfig, weights: Weights, name: str, q_lora_rank: int | None, score_gain: float = 1.0
    ) -> None:
        self._sizes = sizes
        self._q_rank = q_lora_rank
        q_name = f"{name}.q_proj" if q_lora_rank is None else f"{name}.q_b_proj"
        halves = torch.arange(sizes.qk_rope_head_dim).unflatten(0, (-1, 2)).T.flatten()
        head = torch.cat((torch.arange(sizes.qk_nope_head_dim), sizes.qk_nope_head_dim + halves))
        q_rows = (torch.arange(sizes.num_heads)[:, None] * sizes.qk_head_dim + head).flatten()
        kv_rows = torch.cat((torch.arange(sizes.kv_lora_rank), sizes.kv_lora_rank + halves))
        kv_name = f"{name}.kv_a_proj_with_mqa"
        sorted_rows = {**_rows(weights, q_name, q_rows), **_rows(weights, kv_name, kv_rows)}
        given = same_kind(weights, {**weights, **sorted_rows})
        if q_lora_rank is None:
            self._down = joined(given, [q_name, kv_name])
        else:
            self._down = joined(given, [f"{name}.q_a_proj", kv_name])
            self._q_norm = weights[f"{name}.q_a_layernorm.weight"]
            self._q_up = joined(given, [q_name])
        self._kv_norm = weights[f"{name}.kv_a_layernorm.weight"]
        self._out = joined(weights, [f"{name}.o_proj"])
        self._maps = _Maps(sizes, weights[f"{name}.kv_b_proj.weight"], score_gain * sizes.qk_head_dim**-0.5)

    def __call__(self, index: int, hidden: Tensor, rotation: Rotation, attend: PackedAttention) -> Tensor:
        """See `Attention`."""
        sizes = self._sizes
        first, latent, k_rope = self._down(hidden).split(
            [self._q_rank or sizes.num_heads * sizes.qk_head_dim, sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1
        )
        q = first if self._q_rank is None else self._q_up(rms_norm(first, self._q_norm, _LATENT_NORM_EPS))
        q_nope, q_rope = q.unflatten(-1, (sizes.num_heads, -1)).split(
            [sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1
        )
        latent = rms_norm(latent, self._kv_norm, _LATENT_NORM_EPS)
        kept = torch.cat((latent[:, None], rotation(k_rope[:, None])), dim=-1)
        read = attend.latent(index, torch.cat((q_nope, rotation(q_rope)), dim=-1), kept, self._maps)
        return self._out(read.flatten(1))


class _Maps:
    """`LatentMaps` of one layer: W_UK and W_UV on the side of the queries, or of the latents."""

    def __init__(self, sizes: LatentConfig, weight: Tensor, scale: float) -> None:
        self._sizes = sizes
        self._w_uk, self._w_uv = split_kv_projection(weight, sizes)
        self.scale = scale
        self.v_head_dim = sizes.v_head_dim

    def is_absorbed(self, num_queries: int, num_keys: int) -> bool:
        """By operations: one query against many latents is, a prompt that meets itself is not."""
        absorbed, expanded = (
            latent_attention_flops(self._sizes, num_queries, num_keys, absorbed=form) for form in (True, False)
        )
        return absorbed < expanded

    def absorb(self, q: Tensor) -> Tensor:
        """See `LatentMaps`."""
        nope, rope = q.split([self._sizes.qk_nope_head_dim, self._sizes.qk_rope_head_dim], dim=-1)
        return torch.cat((torch.einsum("qhn,hnr->qhr", nope, self._w_uk), rope), dim=-1)

    def read_out(self, read: Tensor) -> Tensor:
        """See `LatentMaps`; what was read of the rotated part is nobody's value."""
        return torch.einsum("qhr,hvr->qhv", read[..., : self._sizes.kv_lora_rank], self._w_uv)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """See `LatentMaps`."""
        latent, rope = latents.split([self._sizes.kv_lora_rank, self._sizes.qk_rope_head_dim], dim=-1)
        nope = torch.einsum("kr,hnr->khn", latent[:, 0], self._w_uk)
        keys = torch.cat((nope, rope.expand(-1, self._sizes.num_heads, -1)), dim=-1)
        return keys, torch.einsum("kr,hvr->khv", latent[:, 0], self._w_uv)


def _rows(weights: Weights, name: str, rows: Tensor) -> dict[str, Tensor]:
    """A projection, bias and all, with its rows in another order."""
    names = [full for full in (f"{name}.weight", f"{name}.bias") if full in weights]
    return {full: weights[full][rows.to(weights[full].device)] for full in names}
