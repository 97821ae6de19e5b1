"""Task 11: outlier features in full precision, the rest in 8-bit integers, and what that saves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused
from labkit.quantized import QuantizedTensor

pytestmark = pytest.mark.task(11)


class Int8:
    """Task 1's function as the judge computes it, and a record of what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, int, str]] = []

    def __call__(self, x: Tensor, bits: int, *, granularity: str) -> QuantizedTensor:
        """One scale a row."""
        assert x.numel(), "quantize was called with an empty matrix"
        self.calls.append((x, bits, granularity))
        absmax = x.abs().amax(1, keepdim=True)
        scale = torch.where(absmax > 0, absmax / 127, 1.0)
        return QuantizedTensor((x / scale).round().to(torch.int8), scale, None, bits, x.shape[1])


def product(x: Tensor, weight: Tensor, threshold: float) -> Tensor:
    """What comes out in float64: exact sums of the very codes, and full precision for the outliers."""
    outlier = (x.abs() >= threshold).any(0)
    y = x[:, outlier].double() @ weight[:, outlier].double().T
    if bool(outlier.all()):
        return y
    q_x = Int8()(x[:, ~outlier].float(), 8, granularity="token")
    q_w = Int8()(weight[:, ~outlier].float(), 8, granularity="channel")
    sums = q_x.codes.double() @ q_w.codes.double().T
    return y + sums * q_x.scale.double() * q_w.scale.double().T


def case(tokens: int, width: int, out: int, outliers: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Activations below 6 but for some features, which are up to 60; and a weight whose rows differ in size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator).clamp(-5, 5) * torch.linspace(0.3, 1, tokens)[:, None]
    for feature in outliers:
        x[:, feature] = 20 * torch.randn(tokens, generator=generator)
        x[feature % tokens, feature] = 60.0 * (-1) ** feature
    weight = torch.randn(out, width, generator=generator) * torch.logspace(-2, 0, out)[:, None]
    return x, weight


def call(lab: Any, x: Tensor, weight: Tensor, threshold: float = 6.0) -> tuple[Tensor, Int8]:
    """The product, and what was quantized for it."""
    int8 = Int8()
    return lab.llm_int8_linear(x, weight, threshold, quantize=int8), int8


def test_one_token_makes_an_outlier_feature(lab: Any) -> None:
    x = torch.zeros(4, 7)
    x[2, 1], x[0, 3], x[3, 5], x[1, 6] = 6.0, -6.0, 5.9999, -70.0
    x[:, 0] = 2.0  # 8 over all tokens: no outlier, for each is judged alone
    right = torch.tensor([False, True, False, True, False, False, True])
    advice = "A feature counts from |x| = threshold on, with either sign, at one token or more."
    check_equal("outliers at 6", lab.outlier_features(x), right, advice)
    check_equal("outliers at 6 in three axes", lab.outlier_features(x.reshape(2, 2, 7)), right, advice)
    right = torch.tensor([False, False, False, False, False, False, True])
    check_equal("outliers at 6.5", lab.outlier_features(x, 6.5), right, advice)
    right = torch.tensor([True, True, False, True, False, True, True])
    check_equal("outliers at 2", lab.outlier_features(x, 2.0), right, advice)
    check_equal("outliers of one token", lab.outlier_features(x[1]), torch.tensor([*[False] * 6, True]), advice)


def test_outliers_and_the_rest_add_up(lab: Any) -> None:
    for tokens, width, out, outliers, seed in ((5, 48, 7, (3, 40), 1), (1, 9, 4, (8,), 2), (6, 33, 1, (0, 1, 2), 3)):
        x, weight = case(tokens, width, out, outliers, seed)
        got, _ = call(lab, x, weight)
        right = product(x, weight, 6.0)
        what = f"{tokens} tokens of {width} features, outliers {list(outliers)}"
        check_close(what, got, right, scale=float(right.abs().max()), dtype=torch.float32,
                    advice="Outliers in full precision, plus both scales times the sum of the codes.")  # fmt: skip


def test_what_is_quantized_has_no_outliers(lab: Any) -> None:
    for outliers in ((2, 30, 31), (7,)):
        x, weight = case(6, 40, 5, outliers, seed=len(outliers))
        weight[:, list(outliers)] *= 100  # would set the scale of every channel
        got, int8 = call(lab, x, weight)
        right = product(x, weight, 6.0)
        check_close("the product", got, right, scale=float(right.abs().max()), dtype=torch.float32)
        asked = sorted((granularity, bits, len(given)) for given, bits, granularity in int8.calls)
        assert asked == [("channel", 8, 5), ("token", 8, 6)], (
            f"quantize must be called once for the 6 tokens and once for the 5 channels, with 8 bits; was {asked}"
        )
        for given, _, granularity in int8.calls:
            limit = float(given.abs().max())
            most = 6.0 if granularity == "token" else 10.0
            assert limit < most, (
                f"by {granularity}: a value of {limit:.1f} sets a scale, though its feature is taken out"
            )


def test_without_outliers_all_is_int8(lab: Any) -> None:
    for tokens, width, out, seed in ((4, 20, 6, 4), (3, 31, 2, 5)):
        x, weight = case(tokens, width, out, (), seed)
        got, _ = call(lab, x, weight)
        right = product(x, weight, 6.0)
        exact = x.double() @ weight.double().T
        assert float((right - exact).abs().max()) > 1e-3, "the case must tell integers from full precision"
        check_close("no outliers", got, right, scale=float(right.abs().max()), dtype=torch.float32,
                    advice="Every feature is below the threshold, so all are multiplied as integers.")  # fmt: skip


def test_with_outliers_only_all_is_exact(lab: Any) -> None:
    for seed in (6, 7):
        x, weight = case(4, 5, 6, (0, 1, 2, 3, 4), seed)
        got, _ = call(lab, x, weight)
        right = x.double() @ weight.double().T
        check_close(
            "only outliers", got, right, scale=float(right.abs().max()), dtype=torch.float32, plain=x @ weight.T
        )
    x, weight = case(4, 12, 3, (), seed=8)
    got, _ = call(lab, x, weight, 1e-6)
    right = x.double() @ weight.double().T
    check_close("a tiny threshold", got, right, scale=float(right.abs().max()), dtype=torch.float32, plain=x @ weight.T)


def test_sums_do_not_run_over(lab: Any) -> None:
    for width, sign in ((3000, 1.0), (2000, -1.0)):
        x = torch.full((2, width), 5.0)
        weight = torch.stack([torch.full((width,), sign), torch.linspace(-1, 1, width), torch.full((width,), 0.5)])
        got, _ = call(lab, x, weight)
        right = product(x, weight, 6.0)
        check_close(f"{width} products of 127 · 127", got, right, scale=float(right.abs().max()), dtype=torch.float32,
                    advice="Codes must be added up in int32: int8 ends at 127, int16 at 32,767.")  # fmt: skip


def test_it_works_where_plain_int8_fails(lab: Any) -> None:
    for seed in (9, 10):
        x, weight = case(16, 256, 24, (5, 77, 130), seed)
        weight = weight / weight.norm(dim=1, keepdim=True)
        exact = x.double() @ weight.double().T
        plain = product(x, weight, math.inf)
        got, _ = call(lab, x, weight)
        errors = [float((y.double() - exact).square().mean().sqrt()) for y in (got, plain)]
        assert errors[0] < errors[1] / 4, (
            f"three outlier features among 256: the error is {errors[0]:.4f}, that of plain int8 is {errors[1]:.4f}; "
            "taking the outliers out must make it at least four times smaller"
        )


def test_other_shapes_and_dtypes(lab: Any) -> None:
    x, weight = case(6, 32, 5, (4,), seed=11)
    got, _ = call(lab, x.reshape(2, 3, 32), weight)
    right = product(x, weight, 6.0)
    scale = float(right.abs().max())
    check_close("x in three axes", got, right.reshape(2, 3, 5), scale=scale, dtype=torch.float32)
    got, _ = call(lab, x[0], weight)
    one = product(x[:1], weight, 6.0)[0]
    check_close("one token without an axis", got, one, scale=scale, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        half_x, half_weight = x.to(dtype), weight.to(dtype)
        got, _ = call(lab, half_x, half_weight)
        right = product(half_x.float(), half_weight.float(), 6.0)
        assert got.dtype == dtype, f"from {dtype} comes {got.dtype}"
        # Half a unit in the last place of each number, and float32's own roundings.
        excess = (got.double() - right).abs() - 0.501 * torch.finfo(dtype).eps * right.abs()
        assert float(excess.max()) <= 1e-6 * scale, (
            f"{dtype}: row {int(excess.amax(1).argmax())} is off by more than one rounding to {dtype}; compute in "
            "float32 and round once, at the end"
        )


def test_bad_llm_int8_arguments_are_refused(lab: Any) -> None:
    x, weight = case(3, 8, 4, (1,), seed=12)
    right = product(x, weight, 6.0)
    got, _ = call(lab, x, weight)
    check_close("a good call", got, right, scale=float(right.abs().max()), dtype=torch.float32)
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = x.clone()
        spoilt[2, 5] = bad
        check_refused(f"an activation {bad}", lambda given=spoilt: call(lab, given, weight), mentions="[2, 5]")
        check_refused(f"outliers with {bad}", lambda given=spoilt: lab.outlier_features(given), mentions="[2, 5]")
        spoilt = weight.clone()
        spoilt[3, 2] = bad
        check_refused(f"a weight {bad}", lambda given=spoilt: call(lab, x, given), mentions="[3, 2]")
    check_refused("a weight of other features", lambda: call(lab, x, weight[:, :7]), mentions="7")
    check_refused("no tokens", lambda: call(lab, x[:0], weight))
    for threshold in (0.0, -1.0, math.nan, math.inf):
        check_refused(
            f"threshold {threshold}", lambda given=threshold: call(lab, x, weight, given), mentions="threshold"
        )


@pytest.mark.integration
def test_your_own_quantizer_serves(lab: Any) -> None:
    for outliers, seed in (((3, 17), 13), ((), 14)):
        x, weight = case(5, 24, 6, outliers, seed)
        got = lab.llm_int8_linear(x, weight)
        right = product(x, weight, 6.0)
        check_close("with your own task 1", got, right, scale=float(right.abs().max()), dtype=torch.float32)
