"""What KIVI makes of a full block, by lab 13's codes: keys channel by channel, values token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solutions.quantization.kivi import HALF_LARGEST, range_codes
from solutions.quantization.packing import pack_int4, unpack_int4

KIVI_BITS = {"kivi4": 4, "kivi2": 2}

_MOST_CHANNELS = 32
"""The most channels of a value that share a range, as in the paper."""


@dataclass(frozen=True)
class Coded:
    """Blocks as codes within ranges: number = low + scale · code.

    Args:
        packed: codes, uint8 `[blocks, block_size, heads, head_dim · bits / 8]`.
        low: float16; of keys `[blocks, 1, heads, head_dim]`, of values `[blocks, block_size, heads, groups]`.
        scale: as `low`.
    """

    packed: Tensor
    low: Tensor
    scale: Tensor


class KiviCodes:
    """Turns full blocks into codes and back.

    A block's codes depend on the numbers in it alone. The tokens of a block are the group of its keys: larger blocks
    have fewer ranges.

    Args:
        bits: of a code, 4 or 2.
        head_dim: numbers in a head.

    Raises:
        ValueError: a head whose codes don't fill whole bytes.

    Source: KIVI (2402.02750); module section 4.3.
    """

    def __init__(self, bits: int, head_dim: int) -> None:
        self.bits = bits
        self.codes_per_byte = 8 // bits
        if head_dim % self.codes_per_byte:
            raise ValueError(
                f"{self.codes_per_byte} codes of {bits} bits make a byte, and head_dim {head_dim} is no multiple of "
                "that; take another kv_dtype"
            )
        self.group_size = next(size for size in range(min(_MOST_CHANNELS, head_dim), 0, -1) if head_dim % size == 0)
        # Every byte's codes, `[256, codes_per_byte]`: to look them up takes one operation for all.
        nibbles = unpack_int4(torch.arange(256, dtype=torch.uint8)[:, None], 2, signed=False).int()
        self._codes = (nibbles if bits == 4 else torch.stack((nibbles & 3, nibbles >> 2), -1).flatten(1)).float()

    def encode_keys(self, keys: Tensor) -> Coded:
        """Keys `[blocks, block_size, heads, head_dim]`, each channel of a block within its own range."""
        return Coded(*self._packed(range_codes(_in_range(keys), self.bits, 1)))

    def encode_values(self, values: Tensor) -> Coded:
        """Values `[blocks, block_size, heads, head_dim]`, each group of a token's channels within its own range."""
        groups = _in_range(values).unflatten(-1, (-1, self.group_size))
        codes, low, scale = range_codes(groups, self.bits, -1)
        return Coded(*self._packed((codes.flatten(-2), low.squeeze(-1), scale.squeeze(-1))))

    def decode_keys(self, coded: Coded) -> Tensor:
        """Keys in float32, `[blocks, block_size, heads, head_dim]`."""
        return torch.addcmul(coded.low.float(), coded.scale.float(), self._unpacked(coded.packed))

    def decode_values(self, coded: Coded) -> Tensor:
        """Values in float32, `[blocks, block_size, heads, head_dim]`."""
        groups = self._unpacked(coded.packed).unflatten(-1, (-1, self.group_size))
        return torch.addcmul(coded.low.float()[..., None], coded.scale.float()[..., None], groups).flatten(-2)

    def _packed(self, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        codes, low, scale = parts
        nibbles = codes if self.bits == 4 else codes[..., 0::2] | codes[..., 1::2] << 2
        return pack_int4(nibbles, signed=False), low, scale

    def _unpacked(self, packed: Tensor) -> Tensor:
        return self._codes[packed.int()].flatten(-2)


def _in_range(numbers: Tensor) -> Tensor:
    """In float32, within what ranges in float16 can hold."""
    return numbers.float().clamp(-HALF_LARGEST, HALF_LARGEST)
