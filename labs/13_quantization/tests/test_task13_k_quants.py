"""Task 13: what counts, the best scales for it, and the very bytes that GGUF's readers take for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(13)


@dataclass(frozen=True)
class Format:
    """What the tests must know of a format."""

    name: str
    size: int  # bytes of a super-block
    halves: tuple[int, ...]  # where fp16 numbers stand in it
    type: GGMLQuantizationType
    plain: Callable[[Tensor], Tensor]
    gain: float  # the share of the plain error that a search leaves at most

    def encode(self, lab: Any, rows: Tensor, importance: Tensor | None = None) -> Tensor:
        """The lab's bytes, in the right form."""
        packed = getattr(lab, f"encode_{self.name}")(rows, importance)
        return check_form(f"encode_{self.name}", packed, (len(rows), rows.shape[1] // 256 * self.size), torch.uint8)

    def read(self, packed: Tensor) -> Tensor:
        """The weights as GGUF's own reader sees them, float32."""
        return torch.from_numpy(dequantize(packed.numpy(), self.type))


def plain_q4_k(rows: Tensor) -> Tensor:
    """Q4_K without any search, decoded; float64."""
    x = rows.double().reshape(-1, 8, 32)
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale, minimum = (high - low) / 15, -low
    d, dmin = ((numbers.amax(-1, keepdim=True) / 63).half().double() for numbers in (scale, minimum))
    scale = (d * (scale / d).round().clamp(0, 63)).unsqueeze(-1)
    minimum = (dmin * (minimum / dmin).round().clamp(0, 63)).nan_to_num(0).unsqueeze(-1)
    return (scale * ((x + minimum) / scale).round().clamp(0, 15) - minimum).reshape(rows.shape)


def plain_q6_k(rows: Tensor) -> Tensor:
    """Q6_K without any search, decoded; float64."""
    x = rows.double().reshape(-1, 16, 16)
    scale = (x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -32).squeeze(-1)
    d = (scale.gather(-1, scale.abs().argmax(-1, keepdim=True)) / -128).half().double()
    scale = (d * (scale / d).round().clamp(-128, 127)).unsqueeze(-1)
    return (scale * (x / scale).round().clamp(-32, 31)).reshape(rows.shape)


Q4_K = Format("q4_k", 144, (0, 2), GGMLQuantizationType.Q4_K, plain_q4_k, 0.92)
Q6_K = Format("q6_k", 210, (208,), GGMLQuantizationType.Q6_K, plain_q6_k, 0.94)
FORMATS = pytest.mark.parametrize("form", [Q4_K, Q6_K], ids=["q4_k", "q6_k"])


def drawn(seed: int, *shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(seed: int, rows: int, columns: int) -> Tensor:
    """A weight whose blocks of 32 differ in size by a factor of about ten."""
    sizes = drawn(seed + 1, rows, columns // 32, 1).mul(0.6).exp().expand(-1, -1, 32)
    return 0.05 * drawn(seed, rows, columns) * sizes.reshape(rows, columns)


def skewed(seed: int, columns: int) -> Tensor:
    """Importance with a few large entries, float64."""
    return drawn(seed, columns).mul(1.5).exp().double()


def losses(rows: Tensor, decoded: Tensor, importance: Tensor | None = None) -> Tensor:
    """The weighted squared error of each super-block, float64."""
    squares = (decoded.double() - rows.double()).square()
    return (squares if importance is None else squares * importance).reshape(-1, 256).sum(-1)


def fit_error(values: Tensor, weights: Tensor, scale: Tensor, minimum: Tensor | float, low: int, high: int) -> Tensor:
    """The weighted error of each block with the best codes for scale and minimum, float64."""
    x, scale = values.double(), scale.double()
    steps = torch.where(scale == 0, 1, scale)
    codes = ((x + minimum) / steps).round().clamp(low, high)
    return (weights * (scale * codes - minimum - x).square()).sum(-1, keepdim=True)


def check_no_worse(what: str, got: Tensor, limit: Tensor, advice: str) -> None:
    """Fail unless the first error is nowhere above the second."""
    worse = got > limit * 1.0001 + 1e-12
    if bool(worse.any()):
        place = [int(i) for i in worse.nonzero()[0]]
        raise AssertionError(f"{what}: error {float(got[tuple(place)]):.5g} at {place}, where "
                             f"{float(limit[tuple(place)]):.5g} is possible. {advice}")  # fmt: skip


def test_importance_is_the_mean_square_of_all_tokens(lab: Any) -> None:
    inputs = drawn(1, 23, 5) * torch.tensor([0.1, 1.0, 3.0, 0.0, 50.0])
    right = inputs.double().square().mean(0)
    importance, count = None, 0
    for part in inputs.split([1, 4, 11, 7]):
        before = None if importance is None else importance.clone()
        updated, new_count = lab.update_importance(importance, count, part)
        if importance is not None:
            check_equal("the importance that was given", importance, before, "It must stay as it was.")
        importance, count = updated, new_count
    assert count == 23, f"23 tokens were seen, the count is {count!r}"
    advice = "Batches of different sizes count by their tokens."
    check_close("importance", importance, right, scale=float(right.max()), dtype=torch.float64, advice=advice)
    large = torch.tensor([[300.0, -2.0], [400.0, 1.0]], dtype=torch.float16)
    got, _ = lab.update_importance(None, 0, large)
    right = torch.tensor([125_000.0, 2.5], dtype=torch.float64)
    check_close("importance of fp16 inputs", got, right, scale=1e5, dtype=torch.float64, advice="fp16 ends at 65504.")
    check_refused("NaN in the inputs", lambda: lab.update_importance(None, 0, torch.tensor([[1.0, math.nan]])))
    check_refused("no tokens", lambda: lab.update_importance(None, 0, torch.zeros(0, 2)))
    check_refused("another width", lambda: lab.update_importance(got, 2, torch.ones(3, 5)))
    check_refused("importance of no tokens", lambda: lab.update_importance(got, 0, torch.ones(3, 2)))


def test_least_squares_finds_the_best_pair_for_given_codes(lab: Any) -> None:
    values = drawn(2, 60, 9).double()
    values[20:40] += 3  # the best minimum is below 0 here
    values[40:50] -= 3  # and here codes that fall while values rise: the best scale is
    codes = ((values - values.amin(-1, keepdim=True)) * 3).round().clamp(0, 15)
    codes[40:50] = codes[40:50].amax(-1, keepdim=True) - codes[40:50]
    codes[50:53], codes[53:56], codes[56:] = 0, 7, codes[56:].clamp(max=1)
    values[53:55] -= 4
    weights = drawn(3, 60, 9).exp().double()
    parts = [lab.least_squares(values[part], weights[part], codes[part]) for part in (slice(40), slice(40, 60))]
    scale, minimum = (torch.cat(numbers) for numbers in zip(*parts, strict=True))
    for name, numbers in (("the scale", scale), ("the minimum", minimum)):
        check_form(name, numbers, (60, 1), torch.float64)
        assert bool((numbers >= 0).all()), f"{name} must not be negative: {float(numbers.min())}"
    for row in range(60):
        x, w, c = values[row], weights[row], codes[row]
        root = w.sqrt().unsqueeze(-1)
        basis = torch.stack((c, -torch.ones(9, dtype=torch.float64)), -1) * root
        # The best pair is the free one if both are at least 0, else the better one of the borders.
        free = torch.linalg.lstsq(basis, x.unsqueeze(-1) * root, driver="gelsd").solution.flatten()
        only = [max(0.0, float(b @ (x * root[:, 0]) / (b @ b).clamp(min=1e-300))) for b in basis.T]
        pairs = [(only[0], 0.0), (0.0, only[1]), *([tuple(free.tolist())] if float(free.min()) >= 0 else [])]
        right = min(float((w * (a * c - b - x).square()).sum()) for a, b in pairs)
        got = float((w * (scale[row] * c - minimum[row] - x).square()).sum())
        assert got <= right * (1 + 1e-9) + 1e-12, (
            f"row {row}: scale {float(scale[row]):.5g} and minimum {float(minimum[row]):.5g} give the weighted error "
            f"{got:.6g}; {right:.6g} is possible with codes {c.tolist()}"
        )


def test_the_search_finds_better_scales_than_the_range(lab: Any) -> None:
    values = drawn(4, 300, 32)
    values[100:150] += 2
    values[150:200] -= 2
    values[200:240] = values[200:240].abs()
    values[240:300, 5] *= 6
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    for levels, weights in ((15, torch.ones(32)), (15, skewed(5, 32).float()), (7, drawn(6, 300, 32).exp())):
        scale, minimum = lab.fit_scale_min(values, weights, levels)
        for name, numbers in (("the scale", scale), ("the minimum", minimum)):
            check_form(name, numbers, (300, 1), torch.float32)
            assert bool((numbers >= 0).all()), f"{name} must not be negative: {float(numbers.min())}"
        got = fit_error(values, weights, scale, minimum, 0, levels)
        plain = fit_error(values, weights, (high - low).double() / levels, -low.double(), 0, levels)
        check_no_worse(f"{levels + 1} codes", got, plain, "The plain choice must be among the candidates.")
        share = float(got.sum() / plain.sum())
        assert share < 0.9, f"{levels + 1} codes: the search leaves {share:.3f} of the plain error, expected below 0.9"
    scale, minimum = lab.fit_scale_min(torch.zeros(2, 32), torch.ones(32))
    assert float(scale.abs().max()) == float(minimum.abs().max()) == 0, "a block of zeros has scale 0 and minimum 0"


def test_the_symmetric_search_uses_the_extra_code(lab: Any) -> None:
    values = drawn(7, 300, 16)
    values[100:200] = values[100:200].abs()
    values[200:300] = -values[200:300].abs()
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    for limit, weights, most in ((32, torch.ones(16), 0.95), (4, skewed(8, 16).float(), 0.75)):
        scale = check_form("the scale", lab.fit_scale(values, weights, limit), (300, 1), torch.float32)
        got = fit_error(values, weights, scale, 0.0, -limit, limit - 1)
        plain = fit_error(values, weights, extreme.double() / -limit, 0.0, -limit, limit - 1)
        check_no_worse(f"limit {limit}", got, plain, "The plain choice must be among the candidates.")
        for first, what in ((0, "both signs"), (100, "positive values"), (200, "negative values")):
            share = float(got[first : first + 100].sum() / plain[first : first + 100].sum())
            assert share < most, f"limit {limit}, {what}: {share:.3f} of the plain error is left, expected below {most}"
    scale = lab.fit_scale(torch.cat((torch.zeros(1, 16), torch.full((1, 16), 2.5))), torch.ones(16))
    got = fit_error(torch.tensor([[0.0], [2.5]]).expand(2, 16), torch.ones(16), scale, 0.0, -32, 31)
    assert bool(scale.isfinite().all()) and float(got.max()) < 1e-10, f"zeros and a constant are exact, got {scale}"


@FORMATS
def test_bytes_mean_what_gguf_reads(lab: Any, form: Format) -> None:
    for rows, blocks in ((40, 3), (1, 1)):
        generator = torch.Generator().manual_seed(9)
        packed = torch.randint(0, 256, (rows, blocks, form.size), dtype=torch.uint8, generator=generator)
        for place in form.halves:
            scales = torch.randn((rows, blocks, 1), generator=generator).mul(0.1).half()
            packed[..., place : place + 2] = scales.view(torch.uint8)
        packed = packed.reshape(rows, -1)
        decoded = getattr(lab, f"decode_{form.name}")(packed)
        check_equal(f"decode_{form.name}", decoded, form.read(packed), "The docstring tells which bit is whose.")


@FORMATS
def test_encoded_weights_are_no_worse_than_plain_rounding(lab: Any, form: Format) -> None:
    for seed, rows, columns in ((10, 40, 768), (20, 1, 256)):
        given = weight(seed, rows, columns)
        before = given.clone()
        decoded = form.read(form.encode(lab, given))
        check_equal("the rows that were given", given, before, "They must stay as they were.")
        got, plain = losses(given, decoded), losses(given, form.plain(given))
        check_no_worse(
            form.name, got, plain, "Keep the plain encoding of a super-block where the search has no better."
        )
        share = float(got.sum() / plain.sum())
        assert share < form.gain, f"the search leaves {share:.3f} of the plain error, expected below {form.gain}"
    half = given.half()
    check_equal("rows in fp16", form.encode(lab, half), form.encode(lab, half.float()), "Compute in float32.")
    both = torch.cat((weight(30, 3, 512), given.expand(2, 256).repeat(1, 2)))
    packed = form.encode(lab, both)
    check_equal("the last row", packed[4], packed[3], "Equal rows have equal bytes, whatever stands beside them.")
    alone = form.encode(lab, both[1:2])
    check_equal("a row by itself", alone, packed[1:2], "A row's bytes depend on that row alone.")


@FORMATS
def test_importance_decides_which_columns_come_out_well(lab: Any, form: Format) -> None:
    given, importance = weight(40, 30, 768), skewed(41, 768)
    with_it, without = (form.read(form.encode(lab, given, choice)) for choice in (importance, None))
    got, plain = losses(given, with_it, importance.repeat(30, 1)), losses(given, form.plain(given), importance)
    check_no_worse(form.name, got, plain, "Choose between plain and searched by the weighted error, too.")
    share = float(got.sum() / losses(given, without, importance).sum())
    assert share < 0.85, f"importance leaves {share:.3f} of the weighted error that there is without; expected < 0.85"
    for factor in (1e-30, 2.0**100):
        same = form.read(form.encode(lab, given, importance * factor))
        share = float(losses(given, same, importance).sum() / got.sum())
        assert share < 1.001, (
            f"importance times {factor:.0e} is the same importance; the error is {share:.4f} of before"
        )
    silent = form.encode(lab, given, torch.zeros(768))
    check_equal("importance 0 for all columns", silent, form.encode(lab, given), "It says as little as None.")
    dead = importance.clone()
    dead[256:512] = 0
    decoded = form.read(form.encode(lab, given, dead))[:, 256:512]
    plain = losses(given, form.plain(given)).view(30, 3)[:, 1]
    share = float(losses(given[:, 256:512], decoded).sum() / plain.sum())
    assert share < form.gain, (
        f"columns that were never active are alike; the search leaves {share:.3f} of the plain error"
    )


@FORMATS
def test_blocks_of_one_value_or_one_sign(lab: Any, form: Format) -> None:
    ordinary = weight(50, 1, 256)[0]
    zero_block = ordinary.clone()
    zero_block[32:64] = 0
    spike = torch.zeros(256)
    spike[77] = -3.0
    cases = {
        "zeros": (torch.zeros(256), 0.0),
        "one block of zeros": (zero_block, 0.15),
        "a constant": (torch.full((256,), 0.7), 2e-3),
        "a negative constant": (torch.full((256,), -0.7), 2e-3),
        "one spike": (spike, 1e-3),
        "positive only": (1 + ordinary.abs(), 0.1),
        "negative only": (-1 - ordinary.abs(), 0.1),
    }
    rows = torch.stack([row for row, _ in cases.values()])
    decoded = form.read(form.encode(lab, rows))
    for (what, (row, most)), got in zip(cases.items(), decoded, strict=True):
        error = float((got - row).abs().max() / row.abs().max().clamp(min=1e-9))
        assert error <= most, f"{what}: the largest error is {error:.4g} of the largest weight, expected at most {most}"
    assert float(decoded[1, 32:64].abs().max()) == 0, "a block of zeros among others decodes to zeros"


@FORMATS
def test_what_is_no_super_block_is_refused(lab: Any, form: Format) -> None:
    encode, decode = getattr(lab, f"encode_{form.name}"), getattr(lab, f"decode_{form.name}")
    good = weight(60, 2, 256)
    error = float((decode(encode(good, torch.ones(256))) - good).abs().max())
    assert error < 0.1 * float(good.abs().max()), f"a good call first: the error is {error}"
    check_refused("rows of 576 columns", lambda: encode(torch.ones(2, 576)), mentions="576")
    check_refused("rows of 32 columns", lambda: encode(torch.ones(2, 32)), mentions="32")
    for bad in (math.nan, math.inf, -math.inf, 2.0**21):
        rows = good.clone()
        rows[1, 200] = bad
        check_refused(f"a weight of {bad}", lambda r=rows: encode(r), mentions="rows")
    check_refused("a vector", lambda: encode(good[0]), mentions="rows")
    check_refused("integers", lambda: encode(torch.ones(2, 256, dtype=torch.int32)), mentions="rows")
    for bad in (math.nan, math.inf, -1.0):
        importance = torch.ones(256)
        importance[3] = bad
        check_refused(f"importance {bad}", lambda i=importance: encode(good, i), mentions="importance")
    check_refused("importance of 255 columns", lambda: encode(good, torch.ones(255)), mentions="255")
    check_refused("half a super-block", lambda: decode(torch.zeros(2, form.size // 2, dtype=torch.uint8)))
    check_refused("bytes as int8", lambda: decode(torch.zeros(2, form.size, dtype=torch.int8)))


@pytest.mark.integration
def test_your_own_importance_makes_a_layer_s_output_better(lab: Any) -> None:
    sizes = drawn(70, 512).exp()
    inputs, given = drawn(71, 400, 512) * sizes, weight(72, 24, 512)
    importance, count = None, 0
    for part in inputs.split(150):
        importance, count = lab.update_importance(importance, count, part)
    fresh = drawn(73, 300, 512) * sizes
    errors = []
    for choice in (importance, None):
        decoded = lab.decode_q4_k(lab.encode_q4_k(given, choice))
        errors.append(float((fresh @ (check_form("decode_q4_k", decoded, (24, 512), torch.float32) - given).T).norm()))
    assert errors[0] < 0.92 * errors[1], (
        f"on fresh inputs the layer's output is off by {errors[0]:.4g} with importance and by {errors[1]:.4g} without"
    )
