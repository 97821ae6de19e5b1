"""Task 6: how much of an outlier moves to the weights, and a product of integers that is exact until it is scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.calibrated_reference import correlated_inputs, gaussian_weight, nearest_codes, nearest_params
from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused
from labkit.quantized import QuantizedTensor

pytestmark = pytest.mark.task(6)

ALPHAS = (0, 0.3, 0.5, 0.75, 1)


def quantize(x: Tensor, bits: int, *, granularity: str) -> QuantizedTensor:
    """Symmetric, one scale a row: what "token" and "channel" ask for."""
    assert granularity in ("token", "channel"), f"w8a8_linear asked for granularity {granularity!r}"
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale, _ = nearest_params(wide, bits, True)
    return QuantizedTensor(nearest_codes(wide, scale, None, bits), scale, None, bits, x.shape[1])


def fold(producers: Sequence[Tensor], weights: Sequence[Tensor], scales: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """Task 5's folding, for norms."""
    return tuple(made / scales for made in producers), tuple(weight * scales for weight in weights)


def linear(lab: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """The layer in integers, with quantization given."""
    return lab.w8a8_linear(x, weight, bias, quantize=quantize)


def right_output(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """The same in float64, whose sums of these integers are exact."""
    tokens = quantize(x.reshape(-1, x.shape[-1]), 8, granularity="token")
    out = (tokens.codes.double() @ weight.codes.double().T) * tokens.scale.double() * weight.scale.double().T
    out = out if bias is None else out + bias.double()
    return out.reshape(*x.shape[:-1], -1)


def test_scales_follow_the_formula(lab: Any) -> None:
    inputs = correlated_inputs(40, 7, 100)
    inputs[:, 4] *= 50
    first, second = gaussian_weight(3, 7, 101), gaussian_weight(5, 7, 102)
    first[2, 3] = -9.0  # the largest magnitude of its column, and negative
    largest = inputs.abs().amax(0)
    columns = torch.maximum(first.abs().amax(0), second.abs().amax(0))
    for alpha in ALPHAS:
        right = largest**alpha / columns ** (1 - alpha)
        advice = "max|X|^α over max|W|^(1−α), the weights' maximum over all rows of all weights."
        what = f"the scales for α = {alpha}"
        got = lab.migration_scales(largest, (first, second), alpha)
        check_close(what, got, right, scale=float(right.max()), dtype=torch.float64, advice=advice)
        got = lab.migration_scales(largest.float(), (first.bfloat16(),), alpha)
        right = largest.float().double() ** alpha / first.bfloat16().double().abs().amax(0) ** (1 - alpha)
        check_close(what, got, right, scale=float(right.max()), dtype=torch.float32, advice=advice)
    halves = lab.migration_scales(largest, (first, second))
    check_close("the scales by default", halves, (largest / columns).sqrt(), scale=20, dtype=torch.float64)


def test_zeros_are_clamped_before_the_division(lab: Any) -> None:
    largest = torch.tensor([0.0, 3.0, 0.0, 1e-9, 2.0, 1e-30], dtype=torch.float64)
    weight = torch.tensor([[0.0, 0.0, 2.0, 1.0, 0.0, 1.0], [0.0, 0.0, -4.0, 0.5, 1e-12, 1.0]], dtype=torch.float64)
    for given, name in ((largest, torch.float64), (largest.half(), torch.float32)):
        for alpha in ALPHAS:
            scales = lab.migration_scales(given, (weight.to(given.dtype),), alpha)
            columns = weight.to(given.dtype).double().abs().amax(0).clamp(min=1e-5)
            right = given.double().clamp(min=1e-5) ** alpha / columns ** (1 - alpha)
            what = f"α = {alpha}, features and columns of zeros"
            advice = "Clamp both maxima to 1e-5 before dividing: 0/0 is NaN and stays so."
            scales = check_form(what, scales, (6,), name)
            assert bool((scales.isfinite() & (scales > 0)).all()), f"{what}: got {scales.tolist()}. {advice}"
            for index in range(6):
                check_close(
                    f"{what}, feature {index}", scales[index : index + 1], right[index : index + 1],
                    scale=float(right[index]), dtype=name, advice=advice,
                )  # fmt: skip


def test_smoothing_changes_no_output(lab: Any) -> None:
    hidden = correlated_inputs(30, 8, 103)
    norm, bias = gaussian_weight(1, 8, 104)[0], gaussian_weight(1, 8, 105)[0]
    norm[6] *= 80
    weights = tuple(gaussian_weight(rows, 8, 106 + rows) for rows in (8, 3, 3))
    inputs = hidden * norm + bias
    largest = inputs.abs().amax(0)
    for alpha in ALPHAS:
        (new_norm, new_bias), new_weights, scales = lab.smooth(
            (norm, bias), weights, largest, alpha, fold_scales=fold
        )  # fmt: skip
        smoothed = hidden * new_norm + new_bias
        check_close("the smoothed inputs", smoothed, inputs / scales, scale=300, dtype=torch.float64)
        assert len(new_weights) == 3, f"three weights were given, {len(new_weights)} came back"
        for weight, new_weight in zip(weights, new_weights, strict=True):
            what = f"a layer's output after smoothing with α = {alpha}"
            scale = 100 * float(largest.max())
            check_close(what, smoothed @ new_weight.T, inputs @ weight.T, scale=scale, dtype=torch.float64)
        columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
        right = largest**alpha / columns ** (1 - alpha)
        check_close("the scales", scales, right, scale=float(right.max()), dtype=torch.float64)


def test_the_layer_is_the_product_of_the_codes(lab: Any) -> None:
    matrix = gaussian_weight(5, 16, 110).float()
    x = correlated_inputs(12, 16, 112)
    # Codes of 127 only: their sum is 258,064, and the output 16.
    matrix[3], x[0] = 1.0, 1.0
    weight = quantize(matrix, 8, granularity="channel")
    bias = gaussian_weight(1, 5, 111)[0].float()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        given = x.to(dtype).reshape(3, 4, 16)
        right = right_output(given, weight, bias)
        got = linear(lab, given, weight, bias)
        check_close(f"the layer in {dtype}", got, right, scale=float(right.abs().max()), dtype=dtype)
        right = right_output(given[0, 0], weight)
        got = linear(lab, given[0, 0], weight)
        check_close(f"one token in {dtype}", got, right, scale=float(right.abs().max()), dtype=dtype)
    whole = QuantizedTensor(weight.codes, weight.scale[:1], None, 8, 16)
    right = right_output(x.float(), whole)
    got = linear(lab, x.float(), whole)
    check_close("a weight with one scale", got, right, scale=float(right.abs().max()), dtype=torch.float32)


def test_each_token_has_its_own_scale(lab: Any) -> None:
    weight = quantize(gaussian_weight(5, 16, 113).float(), 8, granularity="channel")
    x = correlated_inputs(6, 16, 114).float() * torch.tensor([1e-4, 1.0, 1e4, 1.0, 50.0, 1.0])[:, None]
    together = linear(lab, x, weight)
    right = right_output(x, weight)
    for row in range(6):
        what = f"token {row} among larger and smaller ones"
        size = float(right[row].abs().max())
        check_close(
            what, together[row], right[row], scale=size, dtype=torch.float32, advice="One scale for each token."
        )
        alone = linear(lab, x[row : row + 1], weight)
        check_equal(f"token {row}", alone[0], together[row], "It must not depend on the tokens beside it.")


def test_integers_are_added_up_exactly(lab: Any) -> None:
    width = 40_000
    x = torch.zeros(3, width)
    codes = torch.zeros(2, width, dtype=torch.int8)
    x[0], codes[0] = 127.0, 127  # the largest sum: 6.5e8, far beyond 16 bits and beyond float32's integers
    x[1, : width // 2], x[1, width // 2 :] = 127.0, -127.0
    x[1, 7] = 126.0
    x[2, ::3] = -127.0
    codes[1] = -128
    weight = QuantizedTensor(codes, torch.ones(2, 1), None, 8, width)
    right = right_output(x, weight)
    assert float(right[1, 0]) == -127.0
    got = linear(lab, x, weight)
    for row in range(3):
        for column in range(2):
            where = f"token {row}, output {column}"
            check_close(
                where, got[row, column : column + 1], right[row, column : column + 1],
                scale=float(right[row, column].abs()) / 4, dtype=torch.float32,
                advice="All codes are ±127 or ±128 and all scales 1: add up in 32-bit integers, and scale afterwards.",
            )  # fmt: skip


def test_a_token_of_zeros_gives_the_bias(lab: Any) -> None:
    weight = quantize(gaussian_weight(5, 16, 115).float(), 8, granularity="channel")
    bias = gaussian_weight(1, 5, 116)[0].float()
    x = correlated_inputs(3, 16, 117).float()
    x[1] = 0
    got = linear(lab, x, weight, bias)
    check_close("three tokens", got, right_output(x, weight, bias), scale=20, dtype=torch.float32)
    check_equal("the token of zeros", got[1], bias)
    check_equal("the token of zeros without bias", linear(lab, x, weight)[1], torch.zeros(5))


def test_smoothing_helps_where_features_stick_out(lab: Any) -> None:
    inputs = correlated_inputs(100, 32, 118).float()
    inputs[:, [3, 20]] *= 60
    weight = gaussian_weight(12, 32, 119).float()
    largest, right = inputs[:60].abs().amax(0), inputs.double() @ weight.double().T

    def error(x: Tensor, w: Tensor) -> float:
        return float((linear(lab, x, quantize(w, 8, granularity="channel")).double() - right)[60:].square().mean())

    plain = error(inputs, weight)
    shares = {}
    for alpha in (0, 0.5, 1):
        scales = lab.migration_scales(largest, (weight,), alpha)
        shares[alpha] = error(inputs / scales, weight * scales) / plain
    assert 0 < shares[0.5] < 0.15, f"with α = 0.5 the squared error should fall below 0.15 of before, got {shares[0.5]}"
    assert shares[0] > 0.5, f"with α = 0 the outliers stay, and so should the error; it fell to {shares[0]:.3f}"
    assert shares[1] > shares[0.5], f"with α = 1 the weights suffer; errors are {shares}"


def test_what_an_integer_product_cannot_do_is_refused(lab: Any) -> None:
    matrix = gaussian_weight(5, 16, 120).float()
    weight = quantize(matrix, 8, granularity="channel")
    x = correlated_inputs(4, 16, 121).float()
    check_close("a good call", linear(lab, x, weight), right_output(x, weight), scale=20, dtype=torch.float32)
    grouped = QuantizedTensor(weight.codes, torch.ones(5, 2), None, 8, 8)
    columns = QuantizedTensor(weight.codes, torch.ones(1, 16), None, 8, 1)
    shifted = QuantizedTensor(weight.codes.abs(), weight.scale, torch.ones(5, 1, dtype=torch.int8), 8, 16)
    for what, bad in (("scales by group", grouped), ("scales by column", columns), ("a zero point", shifted)):
        check_refused(f"a weight with {what}", lambda w=bad: linear(lab, x, w), mentions="weight")
    check_refused("another width", lambda: linear(lab, x[:, :15], weight), mentions="x")
    check_refused("no token", lambda: linear(lab, x[:0], weight), mentions="x")
    check_refused("a bias of another length", lambda: linear(lab, x, weight, torch.zeros(4)), mentions="bias")
    for bad_number in (torch.nan, torch.inf):
        spoilt = x.clone()
        spoilt[2, 3] = bad_number
        check_refused(f"{bad_number} in x", lambda v=spoilt: linear(lab, v, weight), mentions="x")
    wide = QuantizedTensor(torch.ones(1, 140_000, dtype=torch.int8), torch.ones(1, 1), None, 8, 140_000)
    check_refused("more features than an int32 adds up", lambda: linear(lab, torch.ones(1, 140_000), wide))


def test_maxima_that_are_none_are_refused(lab: Any) -> None:
    largest, weight = torch.arange(1.0, 7.0), gaussian_weight(3, 6, 122).float()
    norm = torch.ones(6)
    right = (largest.double() / weight.double().abs().amax(0)).sqrt()
    good = lab.migration_scales(largest, (weight,), 0.5)
    check_close("a good call", good, right, scale=10, dtype=torch.float32)

    def refused(
        what: str, maxima: Tensor, weights: tuple[Tensor, ...], alpha: object = 0.5, mentions: str = ""
    ) -> None:
        check_refused(what, lambda: lab.migration_scales(maxima, weights, alpha), mentions=mentions)
        smooth = lambda: lab.smooth((norm,), weights, maxima, alpha, fold_scales=fold)  # noqa: E731
        check_refused(f"{what}, in smooth", smooth, mentions=mentions)

    for bad in (torch.nan, torch.inf, -1.0):
        spoilt = largest.clone()
        spoilt[2] = bad
        refused(f"a maximum of {bad}", spoilt, (weight,), mentions="activation_max")
    refused("tokens for maxima", weight, (weight,), mentions="activation_max")
    refused("no weight", largest, ())
    refused("another width", largest, (weight[:, :5],), mentions="5")
    spoilt = weight.clone()
    spoilt[1, 2] = torch.nan
    refused("NaN in a weight", largest, (weight, spoilt), mentions="[1]")
    for alpha in (-0.1, 1.1, torch.nan, True, "half"):
        refused(f"alpha {alpha!r}", largest, (weight,), alpha, mentions="alpha")


@pytest.mark.integration
def test_your_own_parts_make_a_smooth_integer_layer(lab: Any) -> None:
    hidden = correlated_inputs(80, 24, 123).float()
    norm, weight = torch.ones(24), gaussian_weight(10, 24, 124).float()
    norm[[2, 15]] = 70.0
    right = (hidden * norm).double() @ weight.double().T
    plain = lab.w8a8_linear(hidden * norm, lab.quantize(weight, 8, granularity="channel"))
    (norm_after,), (weight_after,), _ = lab.smooth((norm,), (weight,), (hidden * norm).abs().amax(0))
    after = lab.w8a8_linear(hidden * norm_after, lab.quantize(weight_after, 8, granularity="channel"))
    share = float((after - right).square().sum() / (plain - right).square().sum())
    assert 0 < share < 0.15, f"smoothing should bring the squared error below 0.15 of before, got {share:.3f}"
