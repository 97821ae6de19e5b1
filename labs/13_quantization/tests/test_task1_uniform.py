"""Task 1: scales, zero points and codes, who shares a scale, and what quantization costs in accuracy and bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.quantization_reference import (
    awkward_matrix,
    check_quantized_form,
    check_quantized_matrix,
    code_limits,
    reference_dequantize,
    reference_quantize,
)
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import weight_shapes
from labkit.quantized import QuantizedTensor

pytestmark = pytest.mark.task(1)

EPS = torch.finfo(torch.float32).eps


def check_scales(what: str, got: object, right: list[float], advice: str) -> None:
    """float32 `[rows, 1]`, each within a few roundings of its own size."""
    scale = check_form(what, got, (len(right), 1), torch.float32)
    for row, (one, wanted) in enumerate(zip(scale[:, 0].tolist(), right, strict=True)):
        assert abs(one / wanted - 1) <= 4 * EPS, f"{what}, row {row}: got {one:.7g}, right is {wanted:.7g}. {advice}"


def test_codes_have_their_range(lab: Any) -> None:
    for bits in range(2, 9):
        for symmetric in (True, False):
            got, right = lab.code_range(bits, symmetric), code_limits(bits, symmetric)
            assert tuple(got) == right, f"{bits} bits, symmetric={symmetric}: codes run from {right}, got {got}"


def test_the_largest_magnitude_sets_a_symmetric_scale(lab: Any) -> None:
    values = torch.tensor([[1.0, -3.5, 2.0], [0.25, 0.5, 1.75], [-0.5, -7.0, -1.0], [0.3, 0.3, 0.3]])
    largest = [3.5, 1.75, 7.0, values[3, 0].item()]
    for bits in (2, 3, 4, 8):
        scale, zero_point = lab.group_params(values, bits, True)
        right = [number / (2 ** (bits - 1) - 1) for number in largest]
        check_scales(f"{bits}-bit scale", scale, right, "max |w| / (2^(b-1) - 1), whatever signs the numbers have.")
        assert zero_point is None, f"symmetric codes have no zero point, got {zero_point!r}"


def test_a_zero_point_makes_zero_a_code(lab: Any) -> None:
    # In steps, the ranges are: -4 … 11, 0 … 15 (all positive), -15 … 0 (all negative), a constant, and -7.25 … 7.75.
    values = torch.tensor([[-1.0, 2.75, 0.3], [2.0, 7.5, 4.0], [-3.0, -15.0, -9.0], [0.3] * 3, [-1.8125, 1.9375, 0.0]])
    scale, zero_point = lab.group_params(values, 4, False)
    right = [0.25, 0.5, 1.0, values[3, 0].item() / 15, 0.25]
    check_scales("4-bit scale", scale, right, "(hi - lo) / 15, where lo = min(w, 0) and hi = max(w, 0).")
    expected = torch.tensor([[4], [0], [15], [0], [7]], dtype=torch.int8)
    check_equal("4-bit zero point", zero_point, expected, "The value 0 lies -lo / s steps above code 0.")
    scale, zero_point = lab.group_params(torch.tensor([[-63.75, 0.0], [-32.0, 31.75]]), 8, False)
    check_scales("8-bit scale", scale, [0.25, 0.25], "(hi - lo) / 255.")
    expected = torch.tensor([[255], [128]], dtype=torch.int16)
    check_equal("8-bit zero point", zero_point, expected, "255 does not fit into int8.")


def test_halves_go_to_the_even_integer(lab: Any) -> None:
    steps = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, -0.4375, 0.5625, -2.625])
    right = torch.tensor([-2, -2, 0, 0, 2, 2, 4, 0, 1, -3], dtype=torch.int8)
    for scale in (1.0, 0.25, 8.0):
        got = lab.to_codes(steps * scale, torch.tensor(scale), None, 4)
        check_equal(
            f"codes of {steps.tolist()} steps of {scale}", got, right, "Round half to even, as torch.round does."
        )
    got = lab.to_codes(torch.tensor([0.0, 1.25, -0.75]), torch.tensor(0.5), torch.tensor(6, dtype=torch.int8), 4)
    check_equal("codes of [0, 2.5, -1.5] steps above zero point 6", got, torch.tensor([6, 8, 4], dtype=torch.int8))


def test_codes_are_clamped_before_the_cast(lab: Any) -> None:
    x = torch.tensor([127.6, 128.0, 200.0, 1e6, 3e38, -127.6, -128.4, -200.0, -1e6, -3e38, 127.4])
    right = torch.tensor([127] * 5 + [-128] * 5 + [127], dtype=torch.int8)
    advice = "Clamp while the codes are still floating point: int8 has no 128, and a cast wraps around or worse."
    check_equal("8-bit codes of numbers beyond the range", lab.to_codes(x, torch.ones(1), None, 8), right, advice)
    x = torch.tensor([[-9.0, -4.0, 0.0, 10.0, 12.0, 300.0], [-3e38, -7.0, -6.0, 8.0, 9.0, 3e38]])
    zero_point = torch.tensor([[4], [6]], dtype=torch.int8)
    right = torch.tensor([[0, 0, 4, 14, 15, 15], [0, 0, 0, 14, 15, 15]], dtype=torch.int8)
    got = lab.to_codes(x, torch.ones(2, 1), zero_point, 4)
    check_equal("4-bit codes beside zero points 4 and 6", got, right, "Clamp after the zero point was added.")
    small = torch.full((2, 1), 1e-38)
    got = lab.to_codes(torch.tensor([[1e30, -1e30], [0.0, 4e-38]]), small, None, 4)
    check_equal("codes that overflow float32", got, torch.tensor([[7, -8], [0, 4]], dtype=torch.int8), advice)


def test_a_scale_is_shared_as_it_broadcasts(lab: Any) -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]]])
    for scale, right in (
        (torch.tensor([[1.0], [0.5]]), [[[1, 2, 3], [-2, -4, -6]]]),
        (torch.tensor([1.0, 2.0, 0.5]), [[[1, 1, 6], [-1, -1, -6]]]),
        (torch.tensor(1.0), [[[1, 2, 3], [-1, -2, -3]]]),
    ):
        codes = torch.tensor(right, dtype=torch.int8)
        check_equal(f"codes for a scale of shape {list(scale.shape)}", lab.to_codes(x, scale, None, 4), codes)
        zeros = torch.arange(scale.numel(), dtype=torch.int8).reshape(scale.shape)
        got = lab.from_codes(codes, scale, zeros)
        expected = scale.double() * (codes.double() - zeros.double())
        check_close(f"numbers for a scale of shape {list(scale.shape)}", got, expected, scale=8.0, dtype=torch.float32)


# Bits, symmetric, granularity, group size, dtype and columns. Every number of bits and every granularity comes with and
# without a zero point, and groups of every kind: one number, a divisor, a row but for one, more than a row. 23 columns
# in groups of 7 leave a last one of 2.
CASES = [
    (2, True, "tensor", None, torch.float32, 23),
    (2, False, "group", 7, torch.float64, 23),
    (3, True, "group", 8, torch.float32, 24),
    (3, False, "channel", None, torch.float16, 23),
    (4, True, "group", 7, torch.bfloat16, 23),
    (4, False, "group", 8, torch.float32, 24),
    (4, True, "input_channel", None, torch.float32, 11),
    (4, False, "tensor", None, torch.float16, 23),
    (5, True, "group", 1, torch.float32, 5),
    (5, False, "token", None, torch.float32, 23),
    (6, True, "group", 22, torch.float32, 23),
    (6, False, "group", 24, torch.float32, 23),
    (7, True, "channel", None, torch.float32, 23),
    (7, False, "input_channel", None, torch.float64, 11),
    (8, True, "token", None, torch.float32, 23),
    (8, False, "group", 11, torch.bfloat16, 23),
    (8, True, "channel", None, torch.float64, 23),
    (8, False, "channel", None, torch.float32, 23),
    (8, True, "tensor", None, torch.float16, 23),
]


def test_every_number_gets_the_nearest_code(lab: Any) -> None:
    for seed, (bits, symmetric, granularity, group_size, dtype, columns) in enumerate(CASES):
        x = awkward_matrix(7, columns, seed, dtype)
        given = x.clone()
        q = lab.quantize(x, bits, symmetric=symmetric, granularity=granularity, group_size=group_size)
        what = f"{bits} bits, {'symmetric' if symmetric else 'zero point'}, {granularity} {group_size or ''} of {dtype}"
        check_quantized_matrix(
            what, q, given, bits, symmetric=symmetric, granularity=granularity, group_size=group_size
        )
        check_equal(f"{what}: the matrix that was given", x, given, "It must not change.")
    x = awkward_matrix(7, 24, 50)
    check_quantized_matrix("by default", lab.quantize(x, 4, group_size=8), x, 4, group_size=8)
    turned = awkward_matrix(23, 7, 51).T
    check_quantized_matrix("a transposed matrix", lab.quantize(turned, 4, group_size=5), turned, 4, group_size=5)


def test_a_group_of_zeros_is_zero(lab: Any) -> None:
    mixed = torch.tensor([[0.0, 0.0, 3.0, -3.0], [0.0] * 4, [1.0, 2.0, 0.0, 0.0]])
    for symmetric in (True, False):
        for granularity, size in (("group", 2), ("channel", None), ("tensor", None), ("input_channel", None)):
            for x in (mixed, torch.zeros(3, 4)):
                what = f"zeros, symmetric={symmetric}, {granularity}"
                q = lab.quantize(x, 4, symmetric=symmetric, granularity=granularity, group_size=size)
                check_quantized_matrix(what, q, x, 4, symmetric=symmetric, granularity=granularity, group_size=size)
                zeros = reference_dequantize(q)[x == 0]
                assert bool((zeros == 0).all()), f"{what}: zeros must come back as exactly 0, got {zeros.tolist()}"
                values = check_form(f"{what}, back", lab.dequantize(q), (3, 4), torch.float32)
                assert bool((values[x == 0] == 0).all()), f"{what}: dequantize must give exactly 0 for zeros"


def test_tiny_and_huge_numbers_stay_finite(lab: Any) -> None:
    for symmetric in (True, False):
        for size in (1e-45, 1e-38, 1e-30, 1e30, torch.finfo(torch.float32).max):
            x = torch.tensor([[1.0, -1.0, 0.5, 0.0], [-0.75, 0.25, 1.0, 1.0]]) * size
            q = lab.quantize(x, 8, symmetric=symmetric, granularity="channel")
            what = f"numbers of size {size}, symmetric={symmetric}"
            check_quantized_form(what, q, (2, 4), 8, (2, 1), symmetric=symmetric)
            values = check_form(f"{what}, back", lab.dequantize(q), (2, 4), torch.float32)
            error = (values.double() - x.double()).abs().max()
            # Half a step is 1/254 of the largest number at most; below the normal range everything may become 0.
            assert float(error) <= max(size / 250, 1e-36), f"{what}: {x.tolist()} come back as {values.tolist()}"


def test_one_sign_and_constants_keep_their_values(lab: Any) -> None:
    known = torch.tensor([[0.8315, 0.4567], [0.4362, 0.2019]])
    right = torch.tensor([[7, 4], [4, 2]]).double() * (0.8315 / 7)
    advice = "The range of symmetric codes is -max |w| to max |w|, also where all numbers have one sign."
    for sign in (1, -1):
        got = lab.dequantize(lab.quantize(known * sign, 4, granularity="tensor"))
        what = f"{(known * sign).tolist()} in 4 symmetric bits"
        check_close(what, got, right * sign, scale=1.0, dtype=torch.float32, advice=advice)
    for constant in (5.0, -0.01, 0.0):
        for symmetric in (True, False):
            x = torch.full((3, 6), constant)
            q = lab.quantize(x, 4, symmetric=symmetric, group_size=4)
            got = check_form(f"a matrix of {constant}", lab.dequantize(q), (3, 6), torch.float32)
            assert float((got - constant).abs().max()) <= 4 * EPS * abs(constant), (
                f"all numbers are {constant}, symmetric={symmetric}: they come back as {got.unique().tolist()}; the "
                f"largest number has a code of its own"
            )


def test_codes_come_back_as_numbers(lab: Any) -> None:
    x = awkward_matrix(6, 10, 7)
    for bits, symmetric, granularity, size in (
        (4, True, "group", 4),
        (8, False, "group", 3),
        (3, False, "channel", None),
        (8, True, "input_channel", None),
        (5, False, "tensor", None),
    ):
        q = reference_quantize(x, bits, symmetric=symmetric, granularity=granularity, group_size=size)
        right = reference_dequantize(q)
        check_close(
            f"{bits} bits, symmetric={symmetric}, {granularity}", lab.dequantize(q), right,
            scale=float(right.abs().max()), dtype=torch.float32,
        )  # fmt: skip
    codes = torch.tensor([[3, 0, 15, 200], [0, 255, 7, 5]], dtype=torch.uint8)
    scale = torch.tensor([[0.5, 2.0], [1.0, 0.25]], dtype=torch.float16)
    zero_point = torch.tensor([[5, 100], [255, 3]], dtype=torch.uint8)
    right = torch.tensor([[-1.0, -2.5, -170.0, 200.0], [-255.0, 0.0, 1.0, 0.5]], dtype=torch.float64)
    got = lab.dequantize(QuantizedTensor(codes, scale, zero_point, 8, 2))
    check_close("unsigned codes below their zero point, float16 scales", got, right, scale=256.0, dtype=torch.float16,
                advice="Unsigned integers have no -2: leave them before you subtract.")  # fmt: skip


def test_the_error_is_a_step_squared_over_twelve(lab: Any) -> None:
    for steps in ([[0.5, 3.0]], [[1.0], [0.125], [7.0]]):
        scale = torch.tensor(steps, dtype=torch.float64)
        got = lab.rounding_mse(scale)
        check_close(f"rounding_mse of {steps}", got, scale.square() / 12, scale=50 / 12, dtype=torch.float64)
    # An error e that is uniform on [-s/2, s/2] has E e² = s²/12 and E e⁴ = s⁴/80, so e² has the variance
    # s⁴ (1/80 - 1/144) = s⁴/180. The mean over n numbers is off by (12 / √180) / √n relative to s²/12, once in a while;
    # by five times that in one of 1.7 million runs. The numbers below are uniform on [-max, max], where every full step
    # has a uniform error and so have the two half ones at the ends; rounding down instead would give four times s²/12.
    n = 4096
    generator = torch.Generator().manual_seed(12)
    sizes = torch.tensor([1.0, 20.0, 0.01, 3.0, 500.0, 1.0, 7.0, 0.3], dtype=torch.float64)
    x = (torch.rand(8, n, generator=generator, dtype=torch.float64) * 2 - 1) * sizes[:, None]
    slack = 5 * 12 / math.sqrt(180 * n)
    for bits in (3, 4, 8):
        for symmetric in (True, False):
            q = lab.quantize(x, bits, symmetric=symmetric, granularity="channel")
            values = check_form("numbers that came back", lab.dequantize(q), (8, n), torch.float64)
            predicted = sizes * (1 / (2 ** (bits - 1) - 1) if symmetric else 2 / (2**bits - 1))
            ratio = (values - x).square().mean(1) / (predicted.square() / 12)
            assert bool(((ratio - 1).abs() <= slack).all()), (
                f"{bits} bits, symmetric={symmetric}: the mean squared error of each row should be s²/12, up to "
                f"{slack:.3f} of it; the ratios are {[round(float(r), 3) for r in ratio]}"
            )


def test_scales_cost_bits_too(lab: Any) -> None:
    # The module's INT4 at group 128; then blocks of GGUF: Q4_0 and Q8_0 (a 16-bit scale for 32), Q4_1 (and a minimum).
    for arguments, right in (
        ((4, 128), 4.125),
        ((4, 64), 4.25),
        ((4, 32), 4.5),
        ((8, 32), 8.5),
        ((4, 32, 16, 16), 5.0),
        ((4, 128, 16, 4), 4.15625),
        ((3, 64, 32, 8), 3.625),
        ((2, 1, 0, 0), 2.0),
    ):
        got = lab.bits_per_weight(*arguments)
        assert got == right, f"bits_per_weight{arguments} is exactly {right}, got {got!r}"


def llama(layers: int, hidden: int, mlp: int, heads: int) -> int:
    """Parameters of a Llama 3 model."""
    config = ModelConfig(
        "llama", vocab_size=128_256, hidden_size=hidden, intermediate_size=mlp, num_layers=layers, num_heads=heads,
        num_kv_heads=8, head_dim=128, max_context=8192, rope_theta=5e5, norm_eps=1e-5, tie_embeddings=False,
    )  # fmt: skip
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def test_the_memory_numbers_to_know(lab: Any) -> None:
    # The table of module section 4.4, to its own rounding: bf16, 8 bits, 4 bits in groups of 128.
    for name, parameters, right in (
        ("8 B", llama(32, 4096, 14_336, 32), ("16", "8", "4.1")),
        ("70 B", llama(80, 8192, 28_672, 64), ("141", "71", "36")),
    ):
        for bits, shown in zip((16, 8, 4.125), right, strict=True):
            got = lab.weight_bytes(parameters, bits)
            digits = 1 if "." in shown else 0
            assert isinstance(got, int) and f"{got / 1e9:.{digits}f}" == shown, (
                f"{name} ({parameters:,} weights) at {bits} bits take {shown} GB of 1e9 bytes, got {got!r} bytes"
            )
    for arguments, right in (((3, 4.125), 2), ((128, 4.125), 66), ((0, 16), 0), ((1, 2), 1)):
        got = lab.weight_bytes(*arguments)
        assert got == right, f"weight_bytes{arguments} is {right}: a started byte is a byte; got {got!r}"


def test_what_cannot_be_quantized_is_refused(lab: Any) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -0.5]])
    check_quantized_matrix("a good call", lab.quantize(x, 4, granularity="channel"), x, 4, granularity="channel")
    check_quantized_matrix("another", lab.quantize(-x, 3, group_size=2), -x, 3, group_size=2)

    def spoilt(value: float) -> Tensor:
        return torch.where(torch.tensor([[False, True, False], [False] * 3]), value, x)

    for what, bad, named in (("NaN", spoilt(math.nan), "nan"), ("infinity", spoilt(-math.inf), "inf")):
        check_refused(f"x with {what}", lambda bad=bad: lab.quantize(bad, 4, group_size=2), mentions=named)
        check_refused(f"values with {what}", lambda bad=bad: lab.group_params(bad, 4, False), mentions=named)
        check_refused(f"x with {what}", lambda bad=bad: lab.to_codes(bad, torch.ones(1), None, 4), mentions=named)
    for bits in (1, 9, 0, True, 4.0):
        check_refused(f"{bits!r} bits", lambda bits=bits: lab.quantize(x, bits, group_size=2), mentions="bits")
    for size in (0, -1, 2.5, None):
        check_refused(
            f"a group size of {size!r}", lambda size=size: lab.quantize(x, 4, group_size=size), mentions="group_size"
        )
    check_refused("a group size per channel", lambda: lab.quantize(x, 4, granularity="channel", group_size=2))
    check_refused("an unknown granularity", lambda: lab.quantize(x, 4, granularity="row"), mentions="row")
    for what, bad in (("a vector", x[0]), ("no rows", x[:0]), ("no columns", x[:, :0]), ("integers", x.long())):
        check_refused(what, lambda bad=bad: lab.quantize(bad, 4, group_size=2))
    for what, scale in (("zero", 0.0), ("negative", -1.0), ("NaN", math.nan), ("infinite", math.inf)):
        check_refused(f"a scale that is {what}", lambda s=scale: lab.to_codes(x, torch.tensor(s), None, 4))
        check_refused(f"a scale that is {what}", lambda s=scale: lab.rounding_mse(torch.tensor([1.0, s])))
    check_refused("scales that don't fit", lambda: lab.to_codes(x, torch.ones(2), None, 4), mentions="scale")
    check_refused(
        "a zero point that is no code", lambda: lab.to_codes(x, torch.ones(2, 1), torch.tensor([[3], [-1]]), 4)
    )
    check_refused("a zero point of 16", lambda: lab.to_codes(x, torch.ones(1), torch.tensor([16]), 4))
    check_refused("a started bit", lambda: lab.bits_per_weight(4.5, 128))
    check_refused("less than no weights", lambda: lab.weight_bytes(-1, 4))
    check_refused("no bits at all", lambda: lab.weight_bytes(8, 0.0))


def test_codes_that_do_not_fit_are_refused(lab: Any) -> None:
    codes = torch.tensor([[1, -2, 3], [0, 7, -8]], dtype=torch.int8)
    scale = torch.tensor([[0.5, 1.0], [2.0, 4.0]])
    right = torch.tensor([[0.5, -1.0, 3.0], [0.0, 14.0, -32.0]], dtype=torch.float64)
    check_close("a good call", lab.dequantize(QuantizedTensor(codes, scale, None, 4, 2)), right, scale=32.0,
                dtype=torch.float32)  # fmt: skip
    right = torch.tensor([[0.5, -1.0, 1.5], [0.0, 14.0, -16.0]], dtype=torch.float64)
    check_close("another", lab.dequantize(QuantizedTensor(codes, scale[:, :1], None, 4, 3)), right, scale=32.0,
                dtype=torch.float32)  # fmt: skip
    zeros = torch.zeros(2, 2, dtype=torch.int8)
    for what, bad in (
        ("codes that need 4 bits", QuantizedTensor(codes, scale, None, 3, 2)),
        ("negative codes with a zero point", QuantizedTensor(codes, scale, zeros, 4, 2)),
        ("scales for other groups", QuantizedTensor(codes, scale, None, 4, 3)),
        ("scales for other rows", QuantizedTensor(codes[:1], scale, None, 4, 2)),
        ("a scale of 0", QuantizedTensor(codes, scale * 0, None, 4, 2)),
        ("codes that are no integers", QuantizedTensor(codes.float(), scale, None, 4, 2)),
        ("zero points of another shape", QuantizedTensor(codes.abs(), scale, zeros[:1], 4, 2)),
        ("a group size of 0", QuantizedTensor(codes, scale, None, 4, 0)),
    ):
        check_refused(what, lambda bad=bad: lab.dequantize(bad))
