"""Task 2: two codes in a byte, and codes in a stream of bits that is cut into words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.quantization_reference import awkward_matrix, reference_dequantize
from grader.judge.refusal import check_refused
from labkit.quantized import QuantizedTensor

pytestmark = pytest.mark.task(2)


def stream_words(codes: list[int], bits: int) -> list[int]:
    """The words of one row, by way of one long integer."""
    stream = sum(code << (place * bits) for place, code in enumerate(codes))
    words = [(stream >> start) & 0xFFFFFFFF for start in range(0, len(codes) * bits, 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def random_codes(bits: int, *shape: int, signed: bool = False, dtype: torch.dtype = torch.int16) -> Tensor:
    """Codes of the whole range, another draw for each shape."""
    generator = torch.Generator().manual_seed(100 * bits + shape[-1])
    codes = torch.randint(0, 2**bits, shape, generator=generator)
    return (codes - 2 ** (bits - 1) if signed else codes).to(dtype)


def test_the_first_code_lies_in_the_low_half(lab: Any) -> None:
    for codes, signed, right in (
        ([1, 2, 3, 4], False, [0x21, 0x43]),
        ([15, 0, 0, 15], False, [0x0F, 0xF0]),
        ([-1, 7, -8, 1], True, [0x7F, 0x18]),
        ([5, 9, 12], False, [0x95, 0x0C]),
        ([-2], True, [0x0E]),
    ):
        got = lab.pack_int4(torch.tensor(codes, dtype=torch.int8), signed)
        advice = "Two codes a byte, the first in bits 0 to 3; an odd one out stands alone in the last byte."
        check_equal(f"{codes} packed", got, torch.tensor(right, dtype=torch.uint8), advice)


def test_every_byte_holds_two_codes(lab: Any) -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    plain = [[[byte % 16, byte // 16] for byte in range(16 * row, 16 * row + 16)] for row in range(16)]
    unsigned = torch.tensor(plain, dtype=torch.int8).reshape(16, 32)
    got = lab.unpack_int4(packed, 32, False)
    check_equal("all bytes, unsigned", got, unsigned, "Low half first.")
    signed = torch.where(unsigned > 7, unsigned - 16, unsigned)
    check_equal("all bytes, signed", lab.unpack_int4(packed, 32, True), signed, "8 to 15 stand for -8 to -1.")
    got = lab.unpack_int4(packed, 31, True)
    check_equal("an odd number of codes", got, signed[:, :31], "The last half byte belongs to nobody.")
    check_equal("packed again", lab.pack_int4(signed, True), packed)


def test_packed_codes_come_back(lab: Any) -> None:
    for signed, dtype in ((True, torch.int8), (False, torch.uint8), (True, torch.int32), (False, torch.int64)):
        for shape in ((5,), (3, 7), (2, 3, 10), (4, 1)):
            codes = random_codes(4, *shape, signed=signed, dtype=dtype)
            given = codes.clone()
            packed = lab.pack_int4(codes, signed)
            what = f"{dtype} codes {list(shape)}, signed={signed}"
            check_form(f"{what}, packed", packed, (*shape[:-1], (shape[-1] + 1) // 2), torch.uint8)
            back = lab.unpack_int4(packed, shape[-1], signed)
            check_equal(f"{what}, packed and unpacked", back, codes.to(torch.int8))
            check_equal(f"{what} that were given", codes, given, "They must not change.")
    turned = random_codes(4, 6, 5).T
    check_equal("a transposed matrix", lab.unpack_int4(lab.pack_int4(turned, False), 6, False), turned.to(torch.int8))


def test_words_are_filled_from_their_low_bits(lab: Any) -> None:
    for codes, bits, right in (
        (range(8), 4, [0x76543210]),
        ([1, 0, 0, 3], 8, [0x03000001]),
        ([1, 2, 3], 2, [0b111001]),
        ([0] * 7 + [8, 5], 4, [-(2**31), 5]),
        ([255] * 5, 8, [-1, 255]),
    ):
        got = lab.pack_words(torch.tensor(list(codes)), bits)
        advice = "Code i takes the bits from i · bits on, counted from the lowest; int32 is negative if bit 31 is set."
        check_equal(f"{list(codes)} of {bits} bits", got, torch.tensor(right, dtype=torch.int32), advice)


def test_codes_of_three_bits_run_on_across_words(lab: Any) -> None:
    # Code 10 takes bits 30 to 32: two in word 0, one in word 1. Code 21 takes bits 63 to 65.
    cases = ((10, 7, [-(2**30), 1, 0]), (10, 4, [0, 1, 0]), (21, 7, [0, -(2**31), 3]), (31, 1, [0, 0, 2**29]))
    for place, code, right in cases:
        codes = torch.zeros(32, dtype=torch.int8)
        codes[place] = code
        words = torch.tensor(right, dtype=torch.int32)
        check_equal(f"{code} at place {place} of 32", lab.pack_words(codes, 3), words, "32 codes of 3 bits, 3 words.")
        check_equal(f"{code} at place {place} back", lab.unpack_words(words, 32, 3), codes)


def test_a_stream_holds_every_row(lab: Any) -> None:
    for bits in range(2, 9):
        for shape in ((1,), (2, 31), (3, 2, 32), (2, 33), (2, 70)):
            codes = random_codes(bits, *shape)
            count = shape[-1]
            rows = [stream_words(row, bits) for row in codes.reshape(-1, count).tolist()]
            right = torch.tensor(rows, dtype=torch.int32).reshape(*shape[:-1], -1)
            what = f"codes of {bits} bits {list(shape)}"
            check_equal(what, lab.pack_words(codes, bits), right, "Every row is a stream of its own, zeros at its end.")
            back = codes if bits == 8 else codes.to(torch.int8)
            check_equal(f"{what}, back", lab.unpack_words(right, count, bits), back, "Words have no sign of their own.")


def test_what_lies_behind_the_last_code_is_ignored(lab: Any) -> None:
    for bits, count in ((3, 10), (4, 9), (2, 17)):
        used = count * bits % 32
        words = torch.zeros(1, -(-count * bits // 32), dtype=torch.int32)
        words[0, -1] = -(1 << used)
        got = lab.unpack_words(words, count, bits)
        check_equal(f"{count} codes of {bits} bits before a tail of ones", got, torch.zeros(1, count, dtype=torch.int8))
    got = lab.unpack_words(torch.tensor([-1], dtype=torch.int32), 5, 3)
    check_equal("five codes from a word of ones", got, torch.full((5,), 7, dtype=torch.int8))


def test_codes_that_do_not_fit_are_not_packed(lab: Any) -> None:
    check_equal("a good call", lab.pack_int4(torch.tensor([3, 0]), False), torch.tensor([3], dtype=torch.uint8))
    check_equal("another", lab.pack_words(torch.tensor([0, 1]), 4), torch.tensor([16], dtype=torch.int32))
    # -1 is what is left of a zero point of 0 in formats that store one less. Packed, it would read as 15.
    for what, codes, signed in (
        ("-1 as an unsigned code", [0, -1], False),
        ("16", [16, 0], False),
        ("8 as a signed code", [8], True),
        ("-9", [-9], True),
    ):
        check_refused(what, lambda c=codes, s=signed: lab.pack_int4(torch.tensor(c, dtype=torch.int8), s))
    check_refused("-1 in a word", lambda: lab.pack_words(torch.tensor([1, -1]), 4), mentions="-1")
    check_refused("8 in 3 bits", lambda: lab.pack_words(torch.tensor([1, 8], dtype=torch.uint8), 3), mentions="8")
    for what, bad in (("floats", torch.ones(4)), ("booleans", torch.ones(4) > 0), ("no axis", torch.tensor(1)),
                      ("no codes", torch.zeros(3, 0, dtype=torch.int8))):  # fmt: skip
        check_refused(what, lambda bad=bad: lab.pack_int4(bad, False))
        check_refused(what, lambda bad=bad: lab.pack_words(bad, 4))
    for bits in (1, 9, True):
        check_refused(f"{bits!r} bits", lambda bits=bits: lab.pack_words(torch.tensor([0, 1]), bits), mentions="bits")
    packed, words = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.int32)
    check_equal("a good call", lab.unpack_int4(packed + 16, 5, False)[0], torch.tensor([0, 1] * 2 + [0]).to(torch.int8))
    for columns in (4, 7, 0):
        check_refused(f"{columns} codes in 3 bytes", lambda columns=columns: lab.unpack_int4(packed, columns, True))
    for columns in (16, 25, 0):
        check_refused(f"{columns} codes in 3 words", lambda columns=columns: lab.unpack_words(words, columns, 4))
    check_refused("words for bytes", lambda: lab.unpack_int4(words, 5, True))
    check_refused("int64 for words", lambda: lab.unpack_words(words.long(), 20, 4))


@pytest.mark.integration
def test_your_own_codes_survive_packing(lab: Any) -> None:
    # Rows of 23: odd, and no whole number of words. Row 2 is positive throughout, so its zero points are 0.
    x = awkward_matrix(7, 23, 13)
    for bits in (2, 3, 4, 8):
        q = lab.quantize(x, bits, symmetric=False, group_size=8)
        if bits == 4:
            again = lab.quantize(x, 4, group_size=8)
            check_equal("signed codes", lab.unpack_int4(lab.pack_int4(again.codes, True), 23, True), again.codes)
        assert bool((q.zero_point[2] == 0).all()), f"positive groups have a zero point of 0, got {q.zero_point[2]}"
        codes = lab.unpack_words(lab.pack_words(q.codes, bits), 23, bits)
        zero_point = lab.unpack_words(lab.pack_words(q.zero_point, bits), 3, bits)
        back = lab.dequantize(QuantizedTensor(codes, q.scale, zero_point, bits, 8))
        right = reference_dequantize(q)
        check_close(f"{bits} bits, packed and unpacked", back, right, scale=float(x.abs().max()), dtype=torch.float32)
