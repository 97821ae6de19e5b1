"""The sizes of multi-head latent attention (MLA), as one immutable value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from labkit.checks import check_count


@dataclass(frozen=True)
class LatentConfig:
    """What MLA's cache and attention depend on. Names as in DeepSeek's configurations.

    Args:
        num_layers: decoder layers.
        num_heads: query heads; each has keys and values of its own, made from the one latent of a token.
        kv_lora_rank: numbers in the latent.
        qk_rope_head_dim: numbers in the part of queries and keys that carries the position; even. The key part is one
            for all heads.
        qk_nope_head_dim: numbers in the part of a head's queries and keys that carries no position.
        v_head_dim: numbers in a head's value.

    Raises:
        ValueError: a size that no model can have; the message names it.

    Source: DeepSeek-AI 2024 (2405.04434); module section 1.3.
    """

    num_layers: int
    num_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_count(field.name, getattr(self, field.name), 1)
        if self.qk_rope_head_dim % 2 != 0:
            raise ValueError(f"qk_rope_head_dim must be even, since RoPE turns pairs, got {self.qk_rope_head_dim}")

    @property
    def qk_head_dim(self) -> int:
        """Numbers in a head's query or key, both parts together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def tiny(cls, **overrides: Any) -> LatentConfig:
        """Sizes for tests, no two of them equal.

        Args:
            overrides: fields to replace.
        """
        values = {
            "num_layers": 3,
            "num_heads": 5,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 7,
        }
        return cls(**{**values, **overrides})
