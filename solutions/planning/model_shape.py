"""Models as the few numbers that decide what they cost to serve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from labkit.checks import check_count
from labkit.config import ModelConfig
from labkit.decoder import weight_shapes
from solutions.kv_cache.sizing import kv_bytes_per_token

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 4.125 / 8}
"""Bytes of a stored number; INT4 with a 16-bit scale for each 128 of them takes 4.125 bits."""


@dataclass(frozen=True)
class ModelShape:
    """What a dense decoder costs.

    Args:
        name: of the model.
        parameters: how many weights it has.
        num_layers: blocks.
        num_heads: query heads.
        num_kv_heads: heads whose keys and values are stored.
        head_dim: width of a head.
    """

    name: str
    parameters: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for what in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
            check_count(what, getattr(self, what), 1)
        if not (math.isfinite(self.parameters) and self.parameters > 0):
            raise ValueError(f"{self.name}: parameters must be a positive number, got {self.parameters}")

    @classmethod
    def from_config(cls, name: str, source: ModelConfig | str | Path) -> ModelShape:
        """Counted from a `config.json`, every weight of it.

        Raises:
            ValueError: a model that the workbook's decoder doesn't know.
        """
        config = source if isinstance(source, ModelConfig) else ModelConfig.from_huggingface(source)
        parameters = sum(math.prod(shape) for shape in weight_shapes(config).values())
        return cls(name, parameters, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)

    def weight_bytes(self, dtype: str) -> float:
        """Bytes of all weights.

        Raises:
            ValueError: an unknown dtype.
        """
        return self.parameters * bytes_of(dtype)

    def kv_bytes_per_token(self, dtype: str) -> float:
        """Bytes of keys and values that one token adds; section 1.3, lab 07."""
        elements = kv_bytes_per_token(self._as_config(), 1)
        return elements * bytes_of(dtype)

    def flops_per_token(self, num_context: float = 0.0) -> float:
        """FLOP of one token's pass: 2 for each weight, and the attention to what comes before it.

        Args:
            num_context: tokens attended to; 0 leaves attention out.
        """
        return 2 * self.parameters + 4 * self.num_layers * self.num_heads * self.head_dim * num_context

    def _as_config(self) -> ModelConfig:
        return ModelConfig.tiny(
            num_layers=self.num_layers, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )


def bytes_of(dtype: str) -> float:
    """Bytes of a stored number.

    Raises:
        ValueError: an unknown dtype.
    """
    if dtype not in BYTES:
        raise ValueError(f"dtype must be one of {', '.join(BYTES)}, got {dtype!r}")
    return BYTES[dtype]


KNOWN = {
    shape.name: shape
    for shape in (
        ModelShape("qwen2.5-0.5b", 0.494e9, 24, 14, 2, 64),
        ModelShape("qwen2.5-1.5b", 1.544e9, 28, 12, 2, 128),
        ModelShape("llama-3-8b", 8.03e9, 32, 32, 8, 128),
        ModelShape("llama-3-70b", 70.6e9, 80, 64, 8, 128),
        ModelShape("smollm2", 134.5e6, 30, 9, 3, 64),
    )
}
"""By the name that the command line takes. Sources: the models' configurations; module section 1.3."""
