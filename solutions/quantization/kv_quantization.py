"""Task 16: a KV cache of 8 bits a number, where each token stands for itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.layer_kv import KV_DTYPES, check_new_kv
from labkit.quantization_checks import check_finite

from .fp8 import decode_fp8, encode_fp8

E4M3_LARGEST = 448.0


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 with a scale for each token of each head, which therefore depends on nothing else.

    Args:
        x: float32, float16 or bfloat16, `[..., tokens, head_dim]`, finite.

    Returns:
        codes: int8 from -127 to 127, of x's shape; x / scale, rounded half to even.
        scale: float32 `[..., tokens, 1]`, max|x| / 127; 1 for a token of zeros.

    Raises:
        ValueError: another dtype, or a value that is not finite.

    Source: module sections 4.1 and 4.2.
    """
    if x.dtype not in KV_DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(str, KV_DTYPES))}, got {x.dtype}")
    check_finite("x", x)
    # BEGIN SOLUTION
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    # So small a token has no scale among the normal numbers; 1 turns it to zeros.
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 1.0)
    return (wide / scale).round().to(torch.int8), scale
    # END SOLUTION


def fp8_scale(x: Tensor) -> float:
    """The scale that brings numbers seen in calibration into the range of E4M3: max|x| / 448, 1 if all are 0.

    Args:
        x: any shape, finite, at least one number.

    Raises:
        ValueError: no numbers, or one that is not finite.
    """
    check_finite("x", x)
    if not x.numel():
        raise ValueError("x must hold at least one number to find a scale for")
    # BEGIN SOLUTION
    return float(x.abs().amax()) / E4M3_LARGEST or 1.0
    # END SOLUTION


class Int8KVCache:
    """Keys and values of one layer in INT8; a `LayerKV`."""

    def __init__(self) -> None:
        # Of keys and of values: codes [batch, kv_heads, tokens, head_dim], scale [batch, kv_heads, tokens, 1].
        self._keys: tuple[Tensor, Tensor] | None = None
        self._values: tuple[Tensor, Tensor] | None = None
        self._form: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        # BEGIN SOLUTION
        return 0 if self._keys is None else self._keys[0].shape[2]
        # END SOLUTION

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        # BEGIN SOLUTION
        if self._keys is None or self._values is None:
            return 0
        return sum(part.numel() * part.element_size() for part in (*self._keys, *self._values))
        # END SOLUTION

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens, `[batch, kv_heads, new, head_dim]`.

        Returns:
            Keys and values of all tokens as the codes stand for them, `[batch, kv_heads, tokens, head_dim]` in the
            dtype of the new ones. The new ones, too: attention must not depend on when a token came.

        Raises:
            ValueError: tokens that don't fit those before, or aren't finite. Nothing is stored then.
        """
        check_new_kv(k, v, self._form)
        # BEGIN SOLUTION
        self._form = k[:, :, :0]
        self._keys, self._values = _joined(self._keys, quantize_tokens(k)), _joined(self._values, quantize_tokens(v))
        keys, values = (codes * scale for codes, scale in (self._keys, self._values))
        return keys.to(k.dtype), values.to(k.dtype)
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on; those before it are as if the others had never come.

        Raises:
            ValueError: `length` is no int from 0 to the present length.
        """
        check_kept(length, self.length)
        # BEGIN SOLUTION
        if self._keys is not None and self._values is not None:
            self._keys = self._keys[0][:, :, :length], self._keys[1][:, :, :length]
            self._values = self._values[0][:, :, :length], self._values[1][:, :, :length]
        # END SOLUTION


class Fp8KVCache:
    """Keys and values of one layer in E4M3 under constant scales; a `LayerKV`.

    Args:
        key_scale: the keys' scale, above 0, best from `fp8_scale` of calibration keys. What lies beyond 448 · scale
            becomes the largest number there is.
        value_scale: the same for values.
        encode: called as `encode(x, "e4m3")`, gives uint8 codes and saturates; task 8's.
        decode: called as `decode(codes, "e4m3")`, gives float32; task 8's.

    Raises:
        ValueError: a scale that isn't finite and above 0.
    """

    def __init__(
        self,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        encode: Callable[[Tensor, str], Tensor] = encode_fp8,
        decode: Callable[[Tensor, str], Tensor] = decode_fp8,
    ) -> None:
        for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
            if not 0 < scale < math.inf:
                raise ValueError(f"{name} must be finite and above 0, got {scale!r}")
        self._scales = key_scale, value_scale
        self._encode = encode
        self._decode = decode
        # Codes of keys and of values, [batch, kv_heads, tokens, head_dim].
        self._codes: tuple[Tensor, Tensor] | None = None
        self._form: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        # BEGIN SOLUTION
        return 0 if self._codes is None else self._codes[0].shape[2]
        # END SOLUTION

    @property
    def num_bytes(self) -> int:
        """Bytes of all codes."""
        # BEGIN SOLUTION
        return 0 if self._codes is None else self._codes[0].numel() + self._codes[1].numel()
        # END SOLUTION

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens; arguments, result and errors as for `Int8KVCache.append`.

        A code stands for a number divided by the scale in float32; what comes back is multiplied by it again.
        """
        check_new_kv(k, v, self._form)
        # BEGIN SOLUTION
        self._form = k[:, :, :0]
        new = tuple(self._encode(x.float() / scale, "e4m3") for x, scale in zip((k, v), self._scales, strict=True))
        self._codes = _joined(self._codes, (new[0], new[1]))
        keys, values = (
            self._decode(codes, "e4m3") * scale for codes, scale in zip(self._codes, self._scales, strict=True)
        )
        return keys.to(k.dtype), values.to(k.dtype)
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on, as `Int8KVCache.truncate` does."""
        check_kept(length, self.length)
        # BEGIN SOLUTION
        if self._codes is not None:
            self._codes = self._codes[0][:, :, :length], self._codes[1][:, :, :length]
        # END SOLUTION


def check_kept(length: int, held: int) -> None:
    """Refuse to truncate to anything but an int from 0 to the tokens held."""
    check_count("length", length, 0)
    if length > held:
        raise ValueError(f"length must be at most the {held} tokens held, got {length}")


# BEGIN SOLUTION
def _joined(before: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """New tokens behind those held, part by part."""
    if before is None:
        return new
    return torch.cat((before[0], new[0]), 2), torch.cat((before[1], new[1]), 2)


# END SOLUTION
