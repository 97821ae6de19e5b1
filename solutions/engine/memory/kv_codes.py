"""Keys and values in 8 bits, by lab 13's codes: every head of every token has a scale of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.quantization.fp8 import decode_fp8, encode_fp8
from solutions.quantization.kv_quantization import E4M3_LARGEST, quantize_tokens


class Int8KV:
    """INT8; a `KVFormat`.

    Args:
        computed: the type in which attention reads.
    """

    def __init__(self, computed: torch.dtype) -> None:
        self._computed = computed

    def widths(self, head_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """See `KVFormat`."""
        return (head_dim, torch.int8), (1, torch.float32)

    def encode(self, part: Tensor) -> tuple[Tensor, ...]:
        """See `KVFormat`."""
        return quantize_tokens(part)

    def decode(self, *stored: Tensor) -> Tensor:
        """See `KVFormat`."""
        codes, scale = stored
        return (codes * scale).to(self._computed)


class Fp8KV:
    """E4M3, scaled so that the largest number of a token's head is the largest that there is; a `KVFormat`.

    Args:
        computed: the type in which attention reads.
    """

    def __init__(self, computed: torch.dtype) -> None:
        self._computed = computed
        self._numbers = decode_fp8(torch.arange(256, dtype=torch.uint8), "e4m3")

    def widths(self, head_dim: int) -> tuple[tuple[int, torch.dtype], ...]:
        """See `KVFormat`."""
        return (head_dim, torch.uint8), (1, torch.float32)

    def encode(self, part: Tensor) -> tuple[Tensor, ...]:
        """See `KVFormat`."""
        wide = part.float()
        scale = wide.abs().amax(-1, keepdim=True) / E4M3_LARGEST
        # So small a head has no scale among the normal numbers; 1 turns it to zeros.
        scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 1.0)
        return encode_fp8(wide / scale, "e4m3"), scale

    def decode(self, *stored: Tensor) -> Tensor:
        """See `KVFormat`."""
        codes, scale = stored
        self._numbers = self._numbers.to(codes.device)  # once
        return (self._numbers[codes.int()] * scale).to(self._computed)
