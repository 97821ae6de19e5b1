"""Task 2: small codes without gaps: two in a byte, or a stream of bits in 32-bit words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_bits, check_integers

WORD_BITS = 32


def pack_int4(codes: Tensor, signed: bool) -> Tensor:
    """Two 4-bit codes in each byte, the first of them in the low half.

    Args:
        codes: integers `[..., n]`: −8 to 7 if signed, else 0 to 15.
        signed: negative codes are stored as two's complement, −1 as 15.

    Returns:
        uint8 `[..., ⌈n / 2⌉]`; where n is odd, the high half of the last byte is 0.

    Raises:
        ValueError: no codes, no integers, or a code out of range.
    """
    _check_axis("codes", codes)
    check_integers("codes", codes, *((-8, 7) if signed else (0, 15)))
    # BEGIN SOLUTION
    halves = F.pad(codes, (0, codes.shape[-1] % 2)) & 15
    return (halves[..., 0::2] | halves[..., 1::2] << 4).to(torch.uint8)
    # END SOLUTION


def unpack_int4(packed: Tensor, columns: int, signed: bool) -> Tensor:
    """The codes that `pack_int4` was given.

    Args:
        packed: uint8 `[..., ⌈columns / 2⌉]`.
        columns: n, the number of codes in a row.
        signed: as for packing.

    Returns:
        int8 `[..., columns]`.

    Raises:
        ValueError: no bytes, or another number of them than so many codes take.
    """
    check_count("columns", columns, 1)
    _check_axis("packed", packed)
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed must be uint8, got {packed.dtype}")
    if packed.shape[-1] != -(-columns // 2):
        raise ValueError(f"{columns} codes of 4 bits take {-(-columns // 2)} bytes a row, got {packed.shape[-1]}")
    # BEGIN SOLUTION
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :columns].to(torch.int8)
    # Two's complement: 8 to 15 stand for −8 to −1.
    return (codes ^ 8) - 8 if signed else codes
    # END SOLUTION


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes one after another in a stream of bits, low bits first, cut into 32-bit words.

    Code i takes the bits from i · bits on; bit b of the stream is bit b mod 32 of word b div 32. Where 32 is no
    multiple of `bits`, codes run on across words: 32 codes of 3 bits take 3 words.

    Args:
        codes: integers `[..., n]`, 0 to 2^bits − 1.
        bits: of a code, 2 to 8.

    Returns:
        int32 `[..., ⌈n · bits / 32⌉]`; a word whose highest bit is set is negative. Bits behind the last code are 0.

    Raises:
        ValueError: no codes, no integers, a code out of range, or another number of bits.
    """
    check_bits(bits)
    _check_axis("codes", codes)
    check_integers("codes", codes, 0, 2**bits - 1)
    # BEGIN SOLUTION
    count = codes.shape[-1]
    # The pattern repeats: 32 codes fill `bits` words.
    periods = F.pad(codes.to(torch.int64), (0, -count % WORD_BITS)).unflatten(-1, (-1, WORD_BITS))
    words = periods.new_zeros(*periods.shape[:-1], bits)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        shifted = periods[..., index] << shift
        words[..., word] |= shifted
        if shift + bits > WORD_BITS:
            words[..., word + 1] |= shifted >> WORD_BITS
    words = words.flatten(-2)[..., : _num_words(count, bits)] & (2**WORD_BITS - 1)
    return torch.where(words < 2 ** (WORD_BITS - 1), words, words - 2**WORD_BITS).to(torch.int32)
    # END SOLUTION


def unpack_words(words: Tensor, columns: int, bits: int) -> Tensor:
    """The codes that `pack_words` was given.

    Args:
        words: int32 `[..., ⌈columns · bits / 32⌉]`.
        columns: n, the number of codes in a row.
        bits: of a code, 2 to 8.

    Returns:
        Integers `[..., columns]`: int8, or int16 for 8 bits.

    Raises:
        ValueError: no words, another number of them than so many codes take, or another number of bits.
    """
    check_bits(bits)
    check_count("columns", columns, 1)
    _check_axis("words", words)
    if words.dtype != torch.int32:
        raise ValueError(f"words must be int32, got {words.dtype}")
    if words.shape[-1] != _num_words(columns, bits):
        raise ValueError(
            f"{columns} codes of {bits} bits take {_num_words(columns, bits)} words a row, got {words.shape[-1]}"
        )
    # BEGIN SOLUTION
    # Without their sign: a shift to the right would fill up with it.
    plain = words.to(torch.int64) & (2**WORD_BITS - 1)
    periods = F.pad(plain, (0, -plain.shape[-1] % bits)).unflatten(-1, (-1, bits))
    codes = periods.new_zeros(*periods.shape[:-1], WORD_BITS)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        codes[..., index] = periods[..., word] >> shift
        if shift + bits > WORD_BITS:
            codes[..., index] |= periods[..., word + 1] << (WORD_BITS - shift)
    codes = codes.flatten(-2)[..., :columns] & (2**bits - 1)
    return codes.to(torch.int16 if bits == 8 else torch.int8)
    # END SOLUTION


def _num_words(columns: int, bits: int) -> int:
    """Words that a row of codes takes, the last one perhaps in part."""
    return -(-columns * bits // WORD_BITS)


def _check_axis(name: str, values: Tensor) -> None:
    """Refuse what has no last axis to pack along."""
    if values.dim() == 0 or values.shape[-1] == 0:
        raise ValueError(f"{name} must be [..., n] with at least one number a row, got shape {list(values.shape)}")
