"""Task 8: every code of both formats, rounding, what happens beyond the largest number, and scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused
from labkit.float_formats import Fp8Tensor

pytestmark = pytest.mark.task(8)

INF, NAN = math.inf, math.nan
CODES = torch.arange(256, dtype=torch.uint8)
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""For decoding only. What torch does with numbers that are too large differs between machines."""


def enumerate_finite(format: str) -> list[float]:
    """The numbers of the codes 0 to the largest finite one, from the definition: subnormals, then each exponent."""
    mantissa_bits, bias, count = {"e4m3": (3, 7, 127), "e5m2": (2, 15, 124)}[format]
    steps = 2**mantissa_bits
    numbers = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    for exponent in range(1, 32):
        numbers += [(1 + m / steps) * 2.0 ** (exponent - bias) for m in range(steps)]
    return numbers[:count]


NUMBERS = {name: torch.tensor(enumerate_finite(name), dtype=torch.float64) for name in TORCH}


def nearest_codes(x: Tensor, format: str) -> Tensor:
    """Codes by search among all numbers, in float64: ties to the even code, and the last one for all beyond it."""
    numbers = NUMBERS[format]
    magnitude = x.double().abs().clamp(max=float(numbers[-1])).contiguous()
    above = torch.searchsorted(numbers, magnitude).clamp(min=1)
    low, high = magnitude - numbers[above - 1], numbers[above] - magnitude
    up = (high < low) | ((high == low) & (above % 2 == 0))
    code = torch.where(up, above, above - 1)
    return torch.where(x.signbit(), code + 128, code).to(torch.uint8)


def check_codes(what: str, got: object, x: Tensor, right: Tensor) -> None:
    """Fail at the first wrong code, and say of which number."""
    codes = check_form(what, got, tuple(x.shape), torch.uint8)
    bad = codes != right
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {float(x[place])!r} at {list(place)} got code 0x{int(codes[place]):02X}, right is "
            f"0x{int(right[place]):02X}; {int(bad.sum())} of {x.numel()} are wrong"
        )


def test_all_256_codes_decode(lab: Any) -> None:
    for format, dtype in TORCH.items():
        got = check_form(f"{format} decoded", lab.decode_fp8(CODES.reshape(2, 128), format), (2, 128), torch.float32)
        got, right = got.reshape(-1), CODES.view(dtype).float()
        same = (got == right) | (got.isnan() & right.isnan())
        assert bool(same.all()), (
            f"{format}: code 0x{int((~same).nonzero()[0]):02X} is {float(right[~same][0])}, got {float(got[~same][0])}"
        )
        assert bool((got.signbit() == right.signbit())[~right.isnan()].all()), f"{format}: 0x80 is -0, not 0"
        numbers = NUMBERS[format]
        check_equal(f"{format}: finite numbers", got[: len(numbers)].double(), numbers)


def test_every_number_of_a_format_keeps_its_code(lab: Any) -> None:
    for format, numbers in NUMBERS.items():
        both = torch.cat([numbers, -numbers]).float()
        codes = torch.cat([CODES[: len(numbers)], CODES[: len(numbers)] + 128])
        check_codes(f"{format} numbers", lab.encode_fp8(both, format), both, codes)
        check_codes(f"{format} numbers, not saturating", lab.encode_fp8(both, format, saturate=False), both, codes)


def test_ties_go_to_the_even_code(lab: Any) -> None:
    for format, numbers in NUMBERS.items():
        middle = ((numbers[1:] + numbers[:-1]) / 2).float()
        even = torch.arange(len(middle)) + torch.arange(len(middle)) % 2
        for sign in (1, -1):
            right = (even + (128 if sign < 0 else 0)).to(torch.uint8)
            x = sign * middle
            check_codes(f"{format}: halfway between neighbours", lab.encode_fp8(x, format), x, right)
        for towards, shift in ((0.0, 0), (INF, 1)):
            x = torch.nextafter(middle, torch.tensor(towards))
            right = (torch.arange(len(middle)) + shift).to(torch.uint8)
            check_codes(f"{format}: a hair from halfway", lab.encode_fp8(x, format), x, right)


def test_values_round_to_the_nearest_number(lab: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for format, numbers in NUMBERS.items():
        lowest, highest = math.log2(float(numbers[1])) - 4, math.log2(float(numbers[-1]))
        exponents = lowest + (highest - lowest) * torch.rand(4000, generator=generator)
        x = torch.exp2(exponents) * torch.where(torch.rand(4000, generator=generator) < 0.5, -1.0, 1.0)
        check_codes(f"{format}, all magnitudes", lab.encode_fp8(x, format), x, nearest_codes(x, format))
        for dtype in (torch.float16, torch.bfloat16):
            half = x[:1000].reshape(20, 50).to(dtype).clamp(-float(numbers[-1]), float(numbers[-1]))
            right = nearest_codes(half, format)
            check_codes(f"{format} from {dtype}", lab.encode_fp8(half, format), half, right)
            view = half.T
            check_codes(f"{format}, a transposed view", lab.encode_fp8(view, format), view, right.T)


def test_the_smallest_numbers(lab: Any) -> None:
    for format, least in (("e4m3", 2.0**-9), ("e5m2", 2.0**-16)):
        x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, least / 2, -least / 2, least * 0.501, least, -least * 1.5])
        right = torch.tensor([0, 128, 0, 128, 0, 0, 128, 1, 1, 130], dtype=torch.uint8)
        got = lab.encode_fp8(x, format)
        check_codes(f"{format}: around the smallest number {least}", got, x, right)


def test_saturation_is_explicit(lab: Any) -> None:
    x = torch.tensor([448, 449, 464, 465, 480, 1000, 57344, 61439, 61440, 65536, 3e38, INF])
    e4m3 = torch.full((12,), 0x7E, dtype=torch.uint8)
    e5m2 = torch.tensor([0x5F, 0x5F, 0x5F, 0x5F, 0x60, 0x64, *[0x7B] * 6], dtype=torch.uint8)
    for format, right in (("e4m3", e4m3), ("e5m2", e5m2)):
        for given, wanted in ((x, right), (-x, right + 128)):
            check_codes(f"{format}, saturating by default", lab.encode_fp8(given, format), given, wanted)
            got = lab.encode_fp8(given, format, saturate=True)
            check_codes(f"{format}, saturating", got, given, wanted)
    half = torch.tensor([65504.0, INF, -500.0], dtype=torch.float16)
    right = torch.tensor([0x7E, 0x7E, 0xFE], dtype=torch.uint8)
    check_codes("e4m3 from float16", lab.encode_fp8(half, "e4m3"), half, right)


def test_without_saturation_overflow_shows(lab: Any) -> None:
    x = torch.tensor([448, 449, 464, 464.01, 465, 480, 1000, INF])
    got = lab.decode_fp8(lab.encode_fp8(torch.cat([x, -x]), "e4m3", saturate=False), "e4m3")
    right = torch.tensor([448.0] * 3 + [NAN] * 5 + [-448.0] * 3 + [NAN] * 5)
    check_form("e4m3, not saturating", got, (16,), torch.float32)
    same = (got == right) | (got.isnan() & right.isnan())
    assert bool(same.all()), (
        f"e4m3 without saturation: {[448, 449, 464, 464.01, 465, 480, 1000, INF]} become {got[:8].tolist()}; what "
        "rounds beyond 448 is NaN, and 464 is halfway to 480, whose code would be odd"
    )
    x = torch.tensor([57344, 61439, 61440, 65536, 3e38, INF])
    right = torch.tensor([0x7B, 0x7B, 0x7C, 0x7C, 0x7C, 0x7C], dtype=torch.uint8)
    for given, wanted in ((x, right), (-x, right + 128)):
        check_codes("e5m2, not saturating", lab.encode_fp8(given, "e5m2", saturate=False), given, wanted)


def test_nan_stays_nan(lab: Any) -> None:
    x = torch.tensor([1.0, NAN, -NAN, 2.0])
    for format in TORCH:
        for saturate in (True, False):
            codes = lab.encode_fp8(x, format, saturate=saturate)
            check_form(f"{format} codes", codes, (4,), torch.uint8)
            right = torch.tensor({"e4m3": [0x38, 0x7F, 0x7F, 0x40], "e5m2": [0x3C, 0x7F, 0x7F, 0x40]}[format])
            right = right.to(torch.uint8)
            check_equal(f"{format} codes of {x.tolist()}, saturate={saturate}", codes, right, "NaN is 0x7F, always.")


def scale_map(q: Fp8Tensor) -> Tensor:
    """The scale of every value, in float64."""
    rows, columns = q.codes.shape
    row_blocks, column_blocks = torch.arange(rows) // q.block_rows, torch.arange(columns) // q.block_columns
    return q.scale.double()[row_blocks][:, column_blocks]


def check_quantized(what: str, q: object, x: Tensor, format: str, block: tuple[int, int]) -> Fp8Tensor:
    """Fail unless every scale is max|x| / largest of its block, and every code nearest to x / scale."""
    assert isinstance(q, Fp8Tensor), f"{what} must be an Fp8Tensor, got {type(q).__name__}"
    found = (q.format, q.block_rows, q.block_columns)
    assert found == (format, *block), f"{what}: format and block are {found}, right is {(format, *block)}"
    maxima = torch.stack([
        torch.stack([part.abs().max() for part in band.split(block[1], 1)]) for band in x.double().split(block[0], 0)
    ])  # fmt: skip
    largest = float(NUMBERS[format][-1])
    scale = torch.where(maxima > 0, maxima / largest, 1.0)
    check_form(f"{what}: scale", q.scale, tuple(scale.shape), torch.float32)
    worst = float((q.scale.double() / scale - 1)[maxima > 0].abs().max()) if bool((maxima > 0).any()) else 0.0
    assert worst < 1e-6, f"{what}: a scale is off by the factor {1 + worst:.6f}; right is max|x| / {largest:.0f}"
    codes = check_form(f"{what}: codes", q.codes, tuple(x.shape), torch.uint8)
    steps = x.double() / scale_map(q)
    # The quotient is rounded before it is encoded, which may decide where two codes are almost equally near.
    right = [nearest_codes(steps * factor, format) for factor in (1 - 3e-7, 1.0, 1 + 3e-7)]
    bad = torch.stack([codes != r for r in right]).all(0)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: x / scale = {float(steps[row, column]):.6g} at row {row}, column {column} got code "
            f"0x{int(codes[row, column]):02X}, nearest is 0x{int(right[1][row, column]):02X}"
        )
    return q


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Normal numbers whose rows, and columns, are of different sizes."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-2, 1, rows)[:, None] * torch.logspace(0, 2, columns)


def test_one_scale_a_tensor_a_row_or_a_block(lab: Any) -> None:
    for rows, columns in ((5, 13), (1, 7), (9, 1)):
        x = matrix(rows, columns, seed=rows)
        for format in TORCH:
            for granularity, block in (("tensor", (rows, columns)), ("channel", (1, columns))):
                q = lab.quantize_fp8(x, format, granularity)
                check_quantized(f"{format}, {granularity}, {[rows, columns]}", q, x, format, block)
    x = matrix(6, 11, seed=3)
    check_quantized("e4m3 and one scale by default", lab.quantize_fp8(x), x, "e4m3", (6, 11))
    check_quantized("a transposed view", lab.quantize_fp8(x.T, "e4m3", "channel"), x.T, "e4m3", (1, 6))
    half = matrix(4, 6, seed=4).half()
    check_quantized("from float16", lab.quantize_fp8(half, "e5m2", "channel"), half, "e5m2", (1, 6))


def test_blocks_at_the_edges_are_smaller(lab: Any) -> None:
    for rows, columns, size in ((7, 10, 4), (8, 4, 4), (3, 9, 4), (5, 5, 1)):
        x = matrix(rows, columns, seed=rows + size)
        q = lab.quantize_fp8(x, "e4m3", "block", size)
        check_quantized(f"{[rows, columns]} in blocks of {size}", q, x, "e4m3", (size, size))
    x = matrix(130, 257, seed=5)
    q = check_quantized("blocks of 128", lab.quantize_fp8(x, "e4m3", "block"), x, "e4m3", (128, 128))
    assert tuple(q.scale.shape) == (2, 3), "130 x 257 values have 2 x 3 blocks of 128"


def test_values_come_back_times_their_scale(lab: Any) -> None:
    x = matrix(7, 10, seed=6)
    for format in TORCH:
        for granularity in ("tensor", "channel", "block"):
            q = lab.quantize_fp8(x, format, granularity, 4)
            signs = torch.where(q.codes < 128, 1.0, -1.0).double()
            right = signs * NUMBERS[format][(q.codes % 128).long()] * scale_map(q)
            what = f"{format}, one scale a {granularity}"
            got = lab.dequantize_fp8(q)
            check_close(what, got, right, scale=float(x.abs().max()), dtype=torch.float32, inputs=(x,))
            # A normal number is off by at most half a step of its mantissa, however large it is.
            normal = x.double().abs() > float(scale_map(q).max()) * {"e4m3": 2.0**-6, "e5m2": 2.0**-14}[format]
            relative = float(((got.double() - x.double()) / x.double()).abs()[normal].max())
            limit = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[format]
            assert relative < limit * 1.0001, f"{what}: a value is off by {relative:.3f} of itself; limit is {limit}"
    given = Fp8Tensor(torch.tensor([[0x38, 0xB8, 0x7E]], dtype=torch.uint8), torch.tensor([[0.5, 4.0]]), "e4m3", 1, 2)
    check_equal("1, -1 and 448 under scales 0.5 and 4", lab.dequantize_fp8(given), torch.tensor([[0.5, -0.5, 1792.0]]))


def test_zero_tiny_and_huge_matrices(lab: Any) -> None:
    mixed = matrix(4, 16, seed=7)
    mixed[2] = 0.0
    for what, x in (("zeros", torch.zeros(4, 16)), ("a row of zeros", mixed)):
        for granularity in ("tensor", "channel", "block"):
            q = lab.quantize_fp8(x, "e4m3", granularity, 2)
            block = {"tensor": (4, 16), "channel": (1, 16), "block": (2, 2)}[granularity]
            check_quantized(f"{what}, {granularity}", q, x, "e4m3", block)
            got = lab.dequantize_fp8(q)
            check_form(what, got, (4, 16), torch.float32)
            check_equal(f"{what}, {granularity}", got[2], torch.zeros(16), "0 / 0 must not happen.")
    for format in TORCH:
        tiny = torch.tensor([[1e-45, -1e-45, 0.0], [1e-44, 3e-42, -1e-41]])
        q = lab.quantize_fp8(tiny, format, "channel")
        got = check_form(f"{format}, tiny", lab.dequantize_fp8(q), (2, 3), torch.float32)
        assert bool((q.scale >= 2.0**-126).all()), f"{format}, tiny values: scales {q.scale.tolist()} have lost digits"
        assert float((got - tiny).abs().max()) <= 1e-41, f"{format}: {tiny.tolist()} became {got.tolist()}"
        huge = torch.tensor([[3.4028234e38, -1e38, 2e37]])
        got = check_form(f"{format}, huge", lab.dequantize_fp8(lab.quantize_fp8(huge, format)), (1, 3), torch.float32)
        off = float(((got.double() - huge.double()) / huge.double()).abs().max())
        assert off < 0.126, f"{format}: {huge.tolist()} became {got.tolist()}"


def test_bad_fp8_arguments_are_refused(lab: Any) -> None:
    x = matrix(3, 5, seed=8)
    check_quantized("a good call", lab.quantize_fp8(x, "e5m2", "channel"), x, "e5m2", (1, 5))
    check_codes("a good call", lab.encode_fp8(x, "e4m3"), x, nearest_codes(x, "e4m3"))
    check_equal("a good call", lab.decode_fp8(CODES[:3], "e4m3"), torch.tensor([0.0, 2.0**-9, 2.0**-8]))
    for bad in (NAN, INF, -INF):
        spoilt = x.clone()
        spoilt[2, 4] = bad
        check_refused(f"a matrix with {bad}", lambda given=spoilt: lab.quantize_fp8(given), mentions="[2, 4]")
    check_refused("a format of that name", lambda: lab.encode_fp8(x, "e3m4"), mentions="e3m4")
    check_refused("decoding a format of that name", lambda: lab.decode_fp8(CODES, "fp8"), mentions="fp8")
    check_refused("quantizing to a format of that name", lambda: lab.quantize_fp8(x, "E4M3"), mentions="E4M3")
    check_refused("encoding float64, which would be rounded twice", lambda: lab.encode_fp8(x.double(), "e4m3"))
    check_refused("quantizing float64", lambda: lab.quantize_fp8(x.double()))
    check_refused("codes that are no uint8", lambda: lab.decode_fp8(CODES.int(), "e4m3"), mentions="uint8")
    check_refused("an unknown granularity", lambda: lab.quantize_fp8(x, "e4m3", "group"), mentions="group")
    check_refused("blocks of 0", lambda: lab.quantize_fp8(x, "e4m3", "block", 0), mentions="block_size")
    check_refused("a row that is no matrix", lambda: lab.quantize_fp8(x[0]))
    check_refused("a matrix without rows", lambda: lab.quantize_fp8(x[:0]))
