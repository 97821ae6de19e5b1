"""A list of tokens, each with what it needs, instead of long tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from labkit.layer_kv import check_new_kv
from labkit.quantization_checks import check_finite

from .fp8 import decode_fp8, encode_fp8


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Clamp as well, though nothing can be beyond."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"x must be a float of at most 32 bits, got {x.dtype}")
    check_finite("x", x)
    wide = x.to(torch.float32)
    scale = wide.abs().max(dim=-1, keepdim=True).values.div(127)
    scale = scale.masked_fill(scale < 2**-126, 1.0)
    return torch.clamp(torch.round(wide.div(scale)), -127, 127).to(torch.int8), scale


def fp8_scale(x: Tensor) -> float:
    """From both ends of the range."""
    check_finite("x", x)
    if x.numel() == 0:
        raise ValueError("there are no numbers")
    largest = max(float(x.max()), -float(x.min()))
    return largest / 448 if largest > 0 else 1.0


class _Listed:
    """A list with an entry for each token: what `store` made of its key and of its value."""

    def __init__(self) -> None:
        self._tokens: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        self._seen: Tensor | None = None

    @property
    def length(self) -> int:
        """Entries."""
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        """Of all parts of all entries."""
        return sum(part.nbytes for pair in self._tokens for parts in pair for part in parts)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """One token after another."""
        check_new_kv(k, v, self._seen)
        self._seen = k
        for token in range(k.shape[2]):
            place = slice(token, token + 1)
            self._tokens.append((self._store(k[:, :, place], 0), self._store(v[:, :, place], 1)))
        keys = [self._load(pair[0], 0) for pair in self._tokens]
        values = [self._load(pair[1], 1) for pair in self._tokens]
        return torch.cat(keys, 2).to(k.dtype), torch.cat(values, 2).to(k.dtype)

    def truncate(self, length: int) -> None:
        """Cut the list."""
        if type(length) is not int or not 0 <= length <= len(self._tokens):
            raise ValueError(f"length must be from 0 to {len(self._tokens)}, got {length!r}")
        self._tokens = self._tokens[:length]

    def _store(self, x: Tensor, which: int) -> tuple[Tensor, ...]:
        return quantize_tokens(x)

    def _load(self, parts: tuple[Tensor, ...], which: int) -> Tensor:
        return parts[0].float() * parts[1]


class Int8KVCache(_Listed):
    """As the list has it."""


class Fp8KVCache(_Listed):
    """The list with other codes."""

    def __init__(
        self,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        encode: Callable[[Tensor, str], Tensor] = encode_fp8,
        decode: Callable[[Tensor, str], Tensor] = decode_fp8,
    ) -> None:
        super().__init__()
        if not all(math.isfinite(scale) and scale > 0 for scale in (key_scale, value_scale)):
            raise ValueError(f"scales must be finite and above 0, got {key_scale} and {value_scale}")
        self._scales, self._encode, self._decode = (key_scale, value_scale), encode, decode

    def _store(self, x: Tensor, which: int) -> tuple[Tensor, ...]:
        return (self._encode(x.to(torch.float32) / self._scales[which], "e4m3"),)

    def _load(self, parts: tuple[Tensor, ...], which: int) -> Tensor:
        return self._decode(parts[0], "e4m3") * self._scales[which]
