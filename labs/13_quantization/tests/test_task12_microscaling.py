"""Task 12: floats of 4 bits, blocks with powers of two as scales, and blocks with small floats as scales."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused
from labkit.float_formats import Mxfp4Tensor, Nvfp4Tensor

pytestmark = pytest.mark.task(12)

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
INF, NAN = math.inf, math.nan


def nearest_fp4(x: Tensor) -> Tensor:
    """Codes by search among all numbers, in float64: ties to the even code, and 6 for all beyond it."""
    magnitude = x.double().abs().clamp(max=6.0).contiguous()
    above = torch.searchsorted(NUMBERS, magnitude).clamp(min=1)
    low, high = magnitude - NUMBERS[above - 1], NUMBERS[above] - magnitude
    code = torch.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    return torch.where(x.signbit(), code + 8, code).to(torch.uint8)


def fp4_numbers(codes: Tensor) -> Tensor:
    """What codes stand for, in float64."""
    return torch.cat([NUMBERS, -NUMBERS])[codes.long()]


def e4m3_numbers(codes: Tensor) -> Tensor:
    """The same for scales of NVFP4; torch decodes alike on all machines."""
    return codes.view(torch.float8_e4m3fn).double()


def nearest_e4m3(x: Tensor, _: str = "e4m3") -> Tensor:
    """Task 8's encoder for positive numbers, by search: ties to the even code, 448 for all beyond it."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    wanted = x.double().clamp(max=448.0).contiguous()
    above = torch.searchsorted(numbers, wanted).clamp(min=1)
    low, high = wanted - numbers[above - 1], numbers[above] - wanted
    return torch.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1).to(torch.uint8)


def float_e4m3(codes: Tensor, _: str = "e4m3") -> Tensor:
    """Task 8's decoder."""
    return codes.view(torch.float8_e4m3fn).float()


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Normal numbers whose size differs from row to row and from column to column."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-1, 1, rows)[:, None] * torch.logspace(0, 1.5, columns)


def block_maxima(x: Tensor, size: int) -> Tensor:
    """max |x| of each block, blocks beginning anew in each row; `[rows, blocks]` in float64."""
    return torch.stack([block.double().abs().amax(1) for block in x.split(size, 1)], 1)


def spread(scale: Tensor, size: int, columns: int) -> Tensor:
    """Each block's scale at each of its columns."""
    return scale[:, torch.arange(columns) // size]


def check_mx(what: str, q: object, x: Tensor) -> Mxfp4Tensor:
    """Fail unless every exponent is floor(log2 max|x|) - 2, and every code the nearest."""
    assert isinstance(q, Mxfp4Tensor), f"{what} must be an Mxfp4Tensor, got {type(q).__name__}"
    maxima = block_maxima(x.float(), 32)
    exponents = torch.tensor([[math.frexp(m)[1] - 3 for m in row] for row in maxima.tolist()]).clamp(min=-127)
    codes = check_form(f"{what}: scale codes", q.scale_codes, tuple(maxima.shape), torch.uint8)
    bad = (codes.int() != exponents + 127) & (maxima > 0)
    if bool(bad.any()):
        row, block = bad.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: block {block} of row {row} has max|x| = {float(maxima[row, block])!r}; its exponent is "
            f"{int(exponents[row, block])}, code {int(exponents[row, block]) + 127}, got {int(codes[row, block])}"
        )
    assert bool((codes < 255).all()), f"{what}: 255 is NaN and must not be written"
    scale = spread(torch.exp2(codes.double() - 127), 32, x.shape[1])
    check_equal(f"{what}: codes", q.codes, nearest_fp4(x.double() / scale), "Nearest to x / 2^exponent, 6 at most.")
    return q


def check_nv(what: str, q: object, x: Tensor) -> Nvfp4Tensor:
    """Fail unless both kinds of scale are right, and every code is nearest under the scale as it is stored."""
    assert isinstance(q, Nvfp4Tensor), f"{what} must be an Nvfp4Tensor, got {type(q).__name__}"
    maxima = block_maxima(x.float(), 16)
    wanted = maxima.amax() / (6 * 448)
    tensor_scale = float(check_form(f"{what}: tensor_scale", q.tensor_scale, (), torch.float32))
    if wanted >= 2.0**-126:
        assert math.isclose(tensor_scale, float(wanted), rel_tol=1e-6), (
            f"{what}: tensor_scale is {tensor_scale:.6g}, right is max|x| / (6 · 448) = {float(wanted):.6g}"
        )
    codes = check_form(f"{what}: scale codes", q.scale_codes, tuple(maxima.shape), torch.uint8)
    ratio = (maxima / 6 / tensor_scale).clamp(min=2.0**-9)
    # Quotients are rounded on the way, which may decide where two codes are almost equally near.
    near = torch.stack([codes == nearest_e4m3(ratio * factor) for factor in (1 - 1e-6, 1.0, 1 + 1e-6)]).any(0)
    if bool((bad := ~near & (maxima > 0)).any()):
        row, block = bad.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: block {block} of row {row} wants max|x| / 6 / tensor_scale = {float(ratio[row, block]):.6g}, "
            f"E4M3 code {int(nearest_e4m3(ratio)[row, block])}; got {int(codes[row, block])}"
        )
    assert bool(((codes > 0) & (codes < 127)).all()), (
        f"{what}: a scale is 0, negative or NaN: {codes.unique().tolist()}"
    )
    steps = x.double() / spread(e4m3_numbers(codes) * tensor_scale, 16, x.shape[1])
    near = torch.stack([q.codes == nearest_fp4(steps * factor) for factor in (1 - 1e-6, 1.0, 1 + 1e-6)]).any(0)
    if bool((~near).any()):
        row, column = (~near).nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: x / scale = {float(steps[row, column]):.6g} at row {row}, column {column} got code "
            f"{int(q.codes[row, column])}, right is {int(nearest_fp4(steps)[row, column])}; the scale is what is stored"
        )
    return q


def quantize_nv(lab: Any, x: Tensor) -> Nvfp4Tensor:
    """With the judge's floats of 8 bits."""
    return lab.quantize_nvfp4(x, encode_fp8=nearest_e4m3, decode_fp8=float_e4m3)


def test_sixteen_codes_of_four_bits(lab: Any) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    for given in (codes, codes.flip(0).reshape(2, 8)):
        got = lab.decode_fp4(given)
        check_equal("FP4 decoded", got, fp4_numbers(given).float(), "1 sign, 2 exponent and 1 mantissa bit, bias 1.")
        assert bool((got.signbit() == (given > 7)).all()), "code 8 is -0"
        check_equal("FP4 encoded", lab.encode_fp4(got), given, "Every number keeps its code.")


def test_four_bits_round_to_the_nearest_and_ties_to_even(lab: Any) -> None:
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    right = torch.tensor([0, 2, 2, 4, 4, 6, 6], dtype=torch.uint8)
    check_equal(f"codes of {middle.tolist()}", lab.encode_fp4(middle), right, "Halfway: the even code.")
    check_equal("codes of their negatives", lab.encode_fp4(-middle), right + 8, "Halfway: the even code.")
    for towards in (0.0, INF):
        x = torch.nextafter(middle, torch.tensor(towards))
        check_equal("codes a hair from halfway", lab.encode_fp4(x), nearest_fp4(x), "No tie: the nearest.")
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(1)) * 3
    for given in (x, x.double(), x.half(), x.bfloat16(), x.T):
        check_equal(f"codes from {given.dtype}", lab.encode_fp4(given), nearest_fp4(given))
    x = torch.tensor([6.0, 6.9, 7.1, 1e30, -7.0, -1e30, -0.0, -0.1])
    right = torch.tensor([7, 7, 7, 7, 15, 15, 8, 8], dtype=torch.uint8)
    check_equal(f"codes of {x.tolist()}", lab.encode_fp4(x), right, "Beyond 6 there is only 6, and signs are kept.")


def test_scale_codes_are_exponents(lab: Any) -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    right = torch.exp2(codes.double() - 127)
    for given, numbers in ((codes, right), (codes[3:21].reshape(3, 6), right[3:21].reshape(3, 6))):
        got = check_form("powers", lab.decode_e8m0(given), tuple(given.shape), torch.float32)
        bad = got.double() != numbers
        assert not bool(bad.any()), (
            f"code {int(given[bad][0])} is {float(numbers[bad][0])!r}, got {float(got[bad][0])!r}"
        )
    got = lab.decode_e8m0(torch.tensor([255, 127], dtype=torch.uint8))
    assert bool(got[0].isnan()) and float(got[1]) == 1.0, f"codes 255 and 127 are NaN and 1, got {got.tolist()}"


def test_the_exponent_is_that_of_the_largest_value(lab: Any) -> None:
    # max|x|, exponent of the scale, and what the largest value comes back as.
    for largest, exponent, back in (
        (2.7, -1, 3.0), (5.5, 0, 6.0), (1.2, -2, 1.0), (4.0, 0, 4.0), (6.0, 0, 6.0), (7.9, 0, 6.0), (8.0, 1, 8.0),
        (957.0, 7, 768.0), (0.375, -4, 0.375), (2.0**-20, -22, 2.0**-20),
    ):  # fmt: skip
        x = torch.full((1, 32), largest / 1000)
        x[0, 9] = -largest
        q = check_mx(f"a block with max|x| = {largest}", lab.quantize_mxfp4(x), x)
        assert int(q.scale_codes) == exponent + 127, f"{largest}: floor(log2 max|x|) - 2 is {exponent}"
        got = float(lab.dequantize_mxfp4(q)[0, 9])
        assert got == -back, f"the value {-largest} must come back as {-back}, got {got}"


def test_just_below_a_power_of_two(lab: Any) -> None:
    for power in (-60, -3, 0, 2, 30, 100):
        below = float(torch.nextafter(torch.tensor(2.0**power), torch.tensor(0.0)))
        x = torch.full((2, 32), below)
        x[1, 0] = 2.0**power
        check_mx(f"a hair below 2^{power}, and 2^{power}", lab.quantize_mxfp4(x), x)


def test_mx_blocks_end_where_the_row_ends(lab: Any) -> None:
    for rows, columns in ((3, 40), (2, 32), (4, 31), (5, 1), (1, 97)):
        x = matrix(rows, columns, seed=columns)
        q = check_mx(f"MXFP4 of {[rows, columns]}", lab.quantize_mxfp4(x), x)
        right = fp4_numbers(q.codes) * spread(torch.exp2(q.scale_codes.double() - 127), 32, columns)
        check_equal(
            f"{[rows, columns]} dequantized", lab.dequantize_mxfp4(q), right.float(), "Powers of two are exact."
        )
    x = matrix(40, 5, seed=2)
    check_mx("a transposed view", lab.quantize_mxfp4(x.T), x.T)
    check_mx("from bfloat16", lab.quantize_mxfp4(x.bfloat16()), x.bfloat16())


def test_mx_zero_tiny_and_huge_blocks(lab: Any) -> None:
    x = torch.zeros(6, 40)
    x[1, :32] = torch.linspace(-1, 1, 32)
    x[2, 3], x[2, 35] = 1e-45, -(2.0**-126)
    x[3] = 3.4028234e38
    x[4, 0], x[4, 32] = 2.0**-125, -(2.0**-124)
    x[5, 0] = -3e38
    q = check_mx("zero, tiny and huge blocks", lab.quantize_mxfp4(x), x)
    got = check_form("dequantized", lab.dequantize_mxfp4(q), (6, 40), torch.float32)
    assert bool(got.isfinite().all()), f"row {int((~got.isfinite()).nonzero()[0, 0])} does not come back finite"
    for what, part in (("a row of zeros", got[0]), ("a block of zeros", got[1, 32:])):
        check_equal(what, part, torch.zeros(len(part)), "Whatever its scale, 0 is 0.")
    assert float(got[3, 0]) == 6 * 2.0**125, f"the largest float32 becomes 6 · 2^125, got {float(got[3, 0])!r}"


def test_nv_scales_are_small_floats_under_a_scale_of_the_tensor(lab: Any) -> None:
    # max|x| = 2688 makes the tensor's scale 1, so that the blocks' scales can be read off.
    x = torch.zeros(2, 40)
    x[0, 3], x[0, 20], x[0, 39], x[1, 0], x[1, 17], x[1, 32] = 2688.0, -6.0, 60.0, 6.6, -0.05, 0.001
    q = check_nv("blocks of known size", quantize_nv(lab, x), x)
    assert float(q.tensor_scale) == 1.0, f"2688 / (6 · 448) is 1, got {float(q.tensor_scale)}"
    # 10 and 1.1 are E4M3's 10 and 1.125; 0.05/6 = 0.00833 is 4.27 steps of 2^-9; 0.001/6 is below half a step.
    right = torch.tensor([[448.0, 1.0, 10.0], [1.125, 4 * 2.0**-9, 2.0**-9]], dtype=torch.float64)
    check_equal("the blocks' scales", e4m3_numbers(q.scale_codes), right, "max|x| / 6, rounded to E4M3, at least 2^-9.")
    for rows, columns in ((3, 40), (4, 16), (2, 15), (5, 1), (1, 49)):
        x = matrix(rows, columns, seed=columns)
        check_nv(f"NVFP4 of {[rows, columns]}", quantize_nv(lab, x), x)
    x = matrix(40, 5, seed=3)
    check_nv("a transposed view", quantize_nv(lab, x.T), x.T)
    check_nv("from float16", quantize_nv(lab, x.half()), x.half())


def test_nv_values_come_back_times_both_scales(lab: Any) -> None:
    for rows, columns in ((3, 40), (2, 7)):
        x = matrix(rows, columns, seed=4)
        q = check_nv(f"{[rows, columns]}", quantize_nv(lab, x), x)
        scale = spread(e4m3_numbers(q.scale_codes), 16, columns) * q.tensor_scale.double()
        right = fp4_numbers(q.codes) * scale
        got = lab.dequantize_nvfp4(q, decode_fp8=float_e4m3)
        check_close(f"{[rows, columns]} dequantized", got, right, scale=float(x.abs().max()), dtype=torch.float32)
    codes = torch.tensor([[2] * 16 + [15] * 4], dtype=torch.uint8)
    q = Nvfp4Tensor(codes, torch.tensor([[0x38, 0x40]], dtype=torch.uint8), torch.tensor(0.5))
    right = torch.tensor([[0.5] * 16 + [-6.0] * 4])
    check_equal("scales 1 and 2 under 0.5", lab.dequantize_nvfp4(q, decode_fp8=float_e4m3), right)


def test_nv_zero_tiny_and_huge_matrices(lab: Any) -> None:
    mixed = torch.zeros(3, 40)
    mixed[0, :16], mixed[1, 20], mixed[2, 39] = torch.linspace(-1, 1, 16), 1e-5, -1e-30
    tiny = torch.tensor([[1e-45, -3e-42, 0.0]])
    huge = torch.tensor([[3.4028234e38, -1e38, 0.0] + [0.0] * 14 + [-2e38]])
    for what, x, slack in (("zeros", torch.zeros(2, 20), 0.0), ("blocks of zeros", mixed, 0.2), ("tiny", tiny, 1e-41),
                           ("huge", huge, 6e37)):  # fmt: skip
        q = check_nv(what, quantize_nv(lab, x), x)
        got = check_form(what, lab.dequantize_nvfp4(q, decode_fp8=float_e4m3), tuple(x.shape), torch.float32)
        assert bool(got.isfinite().all()), f"{what}: {got[~got.isfinite()][0]} came back; 0 / 0 must not happen"
        assert not bool(got[x == 0].any()), f"{what}: a 0 came back as {float(got[x == 0].abs().max())}"
        assert float((got - x).abs().max()) <= slack, f"{what}: off by {float((got - x).abs().max()):.3g}"


def test_smaller_blocks_with_finer_scales_lose_less(lab: Any) -> None:
    for seed in (5, 6):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(seed))
        mx = lab.dequantize_mxfp4(lab.quantize_mxfp4(x))
        nv = lab.dequantize_nvfp4(quantize_nv(lab, x), decode_fp8=float_e4m3)
        errors = [float((y.double() - x.double()).square().mean()) for y in (mx, nv)]
        # Measured over many seeds: 0.0132 and 0.0091, each within 3 %.
        for name, error, right in zip(("MXFP4", "NVFP4"), errors, (0.0132, 0.0091), strict=True):
            assert abs(error / right - 1) < 0.15, f"{name} of normal numbers: squared error {error:.4f}, right {right}"


def test_bad_fp4_arguments_are_refused(lab: Any) -> None:
    x = matrix(3, 20, seed=7)
    check_mx("a good call", lab.quantize_mxfp4(x), x)
    check_nv("a good call", quantize_nv(lab, x), x)
    check_equal("a good call", lab.encode_fp4(x), nearest_fp4(x))
    check_equal("a good call", lab.decode_fp4(torch.tensor([3, 12])), torch.tensor([1.5, -2.0]))
    for bad in (NAN, INF, -INF):
        spoilt = x.clone()
        spoilt[2, 5] = bad
        check_refused(f"MXFP4 of {bad}", lambda given=spoilt: lab.quantize_mxfp4(given), mentions="[2, 5]")
        check_refused(f"NVFP4 of {bad}", lambda given=spoilt: quantize_nv(lab, given), mentions="[2, 5]")
        check_refused(f"FP4 of {bad}", lambda given=spoilt: lab.encode_fp4(given), mentions="[2, 5]")
    beyond = torch.tensor([[1.0, 1e300]], dtype=torch.float64)
    check_refused("MXFP4 of 1e300", lambda: lab.quantize_mxfp4(beyond))
    check_refused("NVFP4 of 1e300", lambda: quantize_nv(lab, beyond))
    check_refused("a row that is no matrix", lambda: lab.quantize_mxfp4(x[0]))
    check_refused("a matrix without rows", lambda: quantize_nv(lab, x[:0]))
    check_refused("a code of 5 bits", lambda: lab.decode_fp4(torch.tensor([3, 16])), mentions="16")
    check_refused("scale codes that are no uint8", lambda: lab.decode_e8m0(torch.tensor([127])), mentions="uint8")


@pytest.mark.integration
def test_your_own_floats_of_8_bits_serve_as_scales(lab: Any) -> None:
    for seed in (8, 9):
        x = matrix(4, 50, seed)
        q = check_nv("with your own task 8", lab.quantize_nvfp4(x), x)
        right = fp4_numbers(q.codes) * spread(e4m3_numbers(q.scale_codes), 16, 50) * q.tensor_scale.double()
        got = lab.dequantize_nvfp4(q)
        check_close("dequantized", got, right, scale=float(x.abs().max()), dtype=torch.float32)
