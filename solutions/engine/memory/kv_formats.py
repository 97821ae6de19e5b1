"""How the pool stores what layers keep: as floats of some type, or as codes with a scale for each token's head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PLAIN: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZED = ("int8", "fp8")
BY_BLOCK = ("kivi4", "kivi2")
"""What stores tokens of a block together, which is more than a format; see `KiviPool`."""

KV_DTYPES = (*PLAIN, *QUANTIZED, *BY_BLOCK)


class KVFormat(Protocol):
    """A way to store numbers, token by token: none depends on which others there are, or came in the same step."""

    def widths(self, head_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """How many numbers of what type each stored tensor has for one head of a token."""

    def encode(self, part: Tensor) -> tuple[Tensor, ...]:
        """The stored tensors `[tokens, heads, width]` of new numbers `[tokens, heads, head_dim]`."""

    def decode(self, *stored: Tensor) -> Tensor:
        """What stored tensors `[..., width]` stand for, `[..., head_dim]` in the type to compute in."""


@dataclass(frozen=True)
class PlainKV:
    """Floats.

    Args:
        stored: their type in memory.
        computed: the type in which attention reads them.
    """

    stored: torch.dtype
    computed: torch.dtype

    def widths(self, head_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """See `KVFormat`."""
        return ((head_dim, self.stored),)

    def encode(self, part: Tensor) -> tuple[Tensor, ...]:
        """See `KVFormat`."""
        return (part.to(self.stored),)

    def decode(self, *stored: Tensor) -> Tensor:
        """See `KVFormat`."""
        return stored[0].to(self.computed)


def kv_format(name: str | None, computed: torch.dtype) -> KVFormat:
    """The format of a name.

    Args:
        name: "fp32", "bf16", "fp16", "int8" or "fp8"; None means the type that is computed in.
        computed: that type.

    Raises:
        ValueError: another name.
    """
    if name is None or name in PLAIN:
        return PlainKV(computed if name is None else PLAIN[name], computed)
    if name not in QUANTIZED:
        raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)} or None, got {name!r}")
    # Imported here: floats need nothing of lab 13.
    from .kv_codes import Fp8KV, Int8KV

    return Int8KV(computed) if name == "int8" else Fp8KV(computed)
