"""Task 16: KIVI, a KV cache of 2 to 4 bits: keys by channel, values by token, the newest tokens as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.layer_kv import check_new_kv

from .packing import pack_words, unpack_words

KIVI_BITS = (2, 3, 4)
HALF_LARGEST = 65504.0


@dataclass(frozen=True)
class Ranges:
    """Numbers as codes within the ranges of their groups: value = low + scale · code.

    Args:
        words: packed codes, int32 `[batch, kv_heads, tokens, words]`, a row of codes for each token's head.
        low: the smallest number of each group, float16.
        scale: the width of a step of each group, float16, above 0.
    """

    words: Tensor
    low: Tensor
    scale: Tensor


def range_codes(groups: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups of numbers, each within its own range, which need not hold 0.

    Keys have channels that are always near 9: a range from 0 on would spend most of its codes on nothing.

    Args:
        groups: float32, of any shape, magnitudes up to 65504.
        bits: of a code.
        dim: the axis along which the numbers of a group stand.

    Returns:
        codes: integers from 0 to 2^bits - 1, of the shape of `groups`: (x - low) / scale, rounded half to even and
            clamped.
        low: the smallest number of each group, float16, `dim` with size 1.
        scale: (largest - smallest) / (2^bits - 1), float16; 1 where that is 0 in float16. The codes are made with the
            rounded low and scale, since these are what is stored.

    Source: KIVI (2402.02750), section 3.
    """
    # BEGIN SOLUTION
    last = 2**bits - 1
    smallest, largest = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    low, scale = smallest.half(), ((largest - smallest) / last).half()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = ((groups - low.float()) / scale.float()).round().clamp(0, last)
    return codes.to(torch.int16), low, scale
    # END SOLUTION


class KiviCache:
    """Keys and values of one layer; a `LayerKV`.

    Keys are quantized in groups of `group_size` neighbouring tokens, each channel for itself: their outliers stay in
    their channels. Values are quantized token by token, in groups of `group_size` neighbouring channels. The newest
    `residual` tokens always stay as they came; what is older is quantized, whenever it came and with however many
    others, so that a cache depends on its tokens alone. Keys wait until a group is full. Group n of the keys holds the
    tokens n · group_size and on.

    Args:
        bits: of a code: 2, 3 or 4.
        group_size: numbers that share a range; head_dim must be a multiple of it.
        residual: tokens that stay in full precision, at least 0.
        pack: called as `pack(codes, bits)`, gives int32 words along the last axis; task 2's.
        unpack: called as `unpack(words, columns, bits)`, gives the codes back; task 2's.

    Raises:
        ValueError: another number of bits, or a size that is too small.

    Source: KIVI (2402.02750); module section 4.3.
    """

    def __init__(
        self,
        bits: int,
        group_size: int,
        residual: int,
        pack: Callable[[Tensor, int], Tensor] = pack_words,
        unpack: Callable[[Tensor, int, int], Tensor] = unpack_words,
    ) -> None:
        if isinstance(bits, bool) or bits not in KIVI_BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, KIVI_BITS))}, got {bits!r}")
        check_count("group_size", group_size, 1)
        check_count("residual", residual, 0)
        self._bits, self._group_size, self._residual = bits, group_size, residual
        self._pack, self._unpack = pack, unpack
        # Quantized tokens, and behind them those in full precision, [batch, kv_heads, tokens, head_dim].
        self._old_keys: Ranges | None = None
        self._old_values: Ranges | None = None
        self._new_keys: Tensor | None = None
        self._new_values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        # BEGIN SOLUTION
        return 0 if self._new_keys is None else self.quantized_keys + self._new_keys.shape[2]
        # END SOLUTION

    @property
    def quantized_keys(self) -> int:
        """Tokens whose keys are quantized."""
        # BEGIN SOLUTION
        return 0 if self._old_keys is None else self._old_keys.words.shape[2]
        # END SOLUTION

    @property
    def quantized_values(self) -> int:
        """Tokens whose values are quantized."""
        # BEGIN SOLUTION
        return 0 if self._old_values is None else self._old_values.words.shape[2]
        # END SOLUTION

    @property
    def num_bytes(self) -> int:
        """Bytes of packed codes, of ranges, and of the tokens in full precision."""
        # BEGIN SOLUTION
        parts = [self._new_keys, self._new_values]
        for old in (self._old_keys, self._old_values):
            if old is not None:
                parts += [old.words, old.low, old.scale]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)
        # END SOLUTION

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens, and quantize those that are not among the newest any more.

        Args:
            k: new keys, `[batch, kv_heads, new, head_dim]`, magnitudes up to 65504.
            v: new values.

        Returns:
            Keys and values of all tokens as the cache now holds them, `[batch, kv_heads, tokens, head_dim]` in the
            dtype of the new ones.

        Raises:
            ValueError: tokens that don't fit those before, aren't finite or too large for float16, or a head_dim that
                is no multiple of `group_size`. Nothing is stored then.
        """
        check_new_kv(k, v, self._new_keys)
        if k.shape[3] % self._group_size:
            raise ValueError(
                f"head_dim must be a multiple of the group_size {self._group_size}, got {k.shape[3]}; values are "
                "quantized in groups of channels"
            )
        largest = max(float(k.abs().amax()), float(v.abs().amax()))
        if largest > HALF_LARGEST:
            raise ValueError(f"magnitudes must be at most {HALF_LARGEST}, since ranges are float16, got {largest}")
        # BEGIN SOLUTION
        keys = k if self._new_keys is None else torch.cat((self._new_keys, k), 2)
        values = v if self._new_values is None else torch.cat((self._new_values, v), 2)
        total = self.quantized_keys + keys.shape[2]
        due_keys = self._due_keys(total) - self.quantized_keys
        due_values = self._due_values(total) - self.quantized_values
        old_keys = _joined(self._old_keys, self._quantize(keys[:, :, :due_keys], by_channel=True))
        old_values = _joined(self._old_values, self._quantize(values[:, :, :due_values], by_channel=False))
        self._old_keys, self._old_values = old_keys, old_values
        # Copies: a view would keep alive what was just quantized.
        self._new_keys, self._new_values = keys[:, :, due_keys:].clone(), values[:, :, due_values:].clone()
        return (
            torch.cat((self._read(self._old_keys, by_channel=True), self._new_keys), 2),
            torch.cat((self._read(self._old_values, by_channel=False), self._new_values), 2),
        )
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on.

        What was quantized can't be had back, and a shorter cache must hold its newest tokens in full precision. So it
        goes only where none of the quantized tokens is among these: to 0, and to lengths of as many quantized keys
        and values as there are now.

        Raises:
            ValueError: `length` is no int from 0 to the present length, or the cache would need tokens in full
                precision that it has only as codes. Nothing is forgotten then.
        """
        check_count("length", length, 0)
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens held, got {length}")
        # BEGIN SOLUTION
        if length == 0:
            self._old_keys = self._old_values = self._new_keys = self._new_values = None
            return
        quantized = self.quantized_keys, self.quantized_values
        if (self._due_keys(length), self._due_values(length)) != quantized:
            raise ValueError(
                f"a cache of {length} tokens holds the newest {self._residual} in full precision, but of the "
                f"{self.length} tokens here the keys of {quantized[0]} and the values of {quantized[1]} are quantized "
                "for good; build the cache anew from the tokens"
            )
        assert self._new_keys is not None and self._new_values is not None
        self._new_keys = self._new_keys[:, :, : length - quantized[0]]
        self._new_values = self._new_values[:, :, : length - quantized[1]]
        # END SOLUTION

    # BEGIN SOLUTION
    def _due_values(self, total: int) -> int:
        """Of so many tokens, how many have quantized values."""
        return max(total - self._residual, 0)

    def _due_keys(self, total: int) -> int:
        """The same for keys, which are quantized a whole group of tokens at a time."""
        return self._due_values(total) // self._group_size * self._group_size

    def _quantize(self, x: Tensor, *, by_channel: bool) -> Ranges | None:
        if not x.shape[2]:
            return None
        dim = 2 if by_channel else 3
        groups = x.float().unflatten(dim, (-1, self._group_size))
        codes, low, scale = range_codes(groups, self._bits, dim + 1)
        return Ranges(self._pack(codes.flatten(dim, dim + 1), self._bits), low.squeeze(dim + 1), scale.squeeze(dim + 1))

    def _read(self, old: Ranges | None, *, by_channel: bool) -> Tensor:
        """Quantized tokens as numbers, none at all if there is nothing."""
        assert self._new_keys is not None
        if old is None:
            return self._new_keys[:, :, :0]
        codes = self._unpack(old.words, self._new_keys.shape[3], self._bits)
        dim = 2 if by_channel else 3
        low, scale = (part.float().repeat_interleave(self._group_size, dim) for part in (old.low, old.scale))
        return (low + scale * codes).to(self._new_keys.dtype)

    # END SOLUTION


# BEGIN SOLUTION
def _joined(before: Ranges | None, new: Ranges | None) -> Ranges | None:
    """New tokens behind those held."""
    if before is None or new is None:
        return before or new
    return Ranges(
        torch.cat((before.words, new.words), 2),
        torch.cat((before.low, new.low), 2),
        torch.cat((before.scale, new.scale), 2),
    )


# END SOLUTION
