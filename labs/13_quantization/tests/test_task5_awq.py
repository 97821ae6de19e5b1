"""Task 5: which features matter, which scales protect them, and how the scales vanish from the model again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.calibrated_reference import (
    correlated_inputs,
    gaussian_weight,
    output_error,
    round_to_nearest,
    scaling_errors,
)
from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(5)

FEATURES = 24


def outlier_inputs(tokens: int, seed: int) -> Tensor:
    """Inputs with two features that are far larger than the others; float64."""
    inputs = correlated_inputs(tokens, FEATURES, seed)
    inputs[:, [5, 17]] *= 20
    return inputs


def search(lab: Any, weights: Sequence[Tensor], inputs: Tensor, bits: int, group_size: int, **options: Any) -> Tensor:
    """The scales found with plain rounding given: positive and finite."""
    scales = lab.search_scales(
        tuple(weights), inputs, bits, group_size, **{"round_to_nearest": round_to_nearest, **options}
    )
    dtype = torch.float64 if inputs.dtype == torch.float64 else torch.float32
    scales = check_form("the scales", scales, (inputs.shape[-1],), dtype)
    assert bool((scales.isfinite() & (scales > 0)).all()), f"scales must be positive and finite, got {scales.tolist()}"
    return scales


def check_best(
    what: str, scales: Tensor, weights: Sequence[Tensor], inputs: Tensor, bits: int, group_size: int, grid: int,
    symmetric: bool = True,
) -> int:  # fmt: skip
    """Fail unless the scales are those of the exponent with the least error; returns that exponent's number."""
    candidates, errors = scaling_errors(weights, inputs, bits, group_size, grid, symmetric)
    best = min(range(grid + 1), key=errors.__getitem__)
    others = errors[:best] + errors[best + 1 :]
    assert not others or min(others) > (1 + 1e-5) * errors[best], "the test's own errors lie too close together"
    shown = ", ".join(f"{error / errors[0]:.3f}" for error in errors)
    check_close(
        f"{what}: the scales", scales, candidates[best], scale=float(candidates[best].max()), dtype=scales.dtype,
        advice=f"α = {best}/{grid} loses least. Errors from α = 0 on, in units of the first: {shown}.",
    )  # fmt: skip
    return best


def test_salience_is_the_mean_magnitude(lab: Any) -> None:
    inputs = correlated_inputs(60, 5, 50)
    inputs[0, 0], inputs[:, 1] = 500.0, torch.tensor([3.0, -3.0]).repeat(30)
    right = inputs.abs().sum(0) / 60
    advice = "The mean of |x| over all tokens: not the largest, not the mean square, and signs don't cancel."
    salience = lab.salience(inputs.reshape(4, 15, 5))
    check_close("salience", salience, right, scale=10, dtype=torch.float64, advice=advice)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        given = torch.full((4000, 2), 40.0).to(dtype)
        given[::2, 1] = -0.5
        right = given.double().abs().mean(0)
        check_close(f"salience of {dtype}", lab.salience(given), right, scale=40, dtype=torch.float32, advice=advice)


def test_folding_leaves_every_output_as_it_was(lab: Any) -> None:
    hidden = correlated_inputs(9, 6, 51)
    norm, bias = gaussian_weight(1, 6, 52)[0], gaussian_weight(1, 6, 53)[0]
    weights = tuple(gaussian_weight(rows, 6, 54 + rows) for rows in (6, 2, 3))
    for scales in (torch.tensor([3.0, 0.2, 1.0, 7.0, 0.5, 11.0]).double(), torch.linspace(0.1, 9, 6).double()):
        given = [tensor.clone() for tensor in (norm, bias, *weights, scales)]
        (new_norm, new_bias), new_weights = lab.fold_scales((norm, bias), weights, scales)
        for before, after in zip(given, (norm, bias, *weights, scales), strict=True):
            check_equal("an argument", after, before, "The tensors that were given must not be changed.")
        check_close("the norm's weight", new_norm, norm / scales, scale=10, dtype=torch.float64)
        check_close("the norm's bias", new_bias, bias / scales, scale=10, dtype=torch.float64)
        assert len(new_weights) == 3, f"three weights were given, {len(new_weights)} came back"
        for weight, new_weight in zip(weights, new_weights, strict=True):
            check_close("a weight", new_weight, weight * scales, scale=30, dtype=torch.float64)
            before, after = (hidden * norm + bias) @ weight.T, (hidden * new_norm + new_bias) @ new_weight.T
            check_close("the layer's output", after, before, scale=100, dtype=torch.float64)


def test_a_linear_layer_is_divided_by_rows(lab: Any) -> None:
    hidden, features = correlated_inputs(9, 5, 60), 5
    gate, up = gaussian_weight(features, 5, 61), gaussian_weight(features, 5, 62)
    bias, down = gaussian_weight(1, features, 63)[0], gaussian_weight(3, features, 64)
    scales = torch.tensor([4.0, 0.3, 1.5, 9.0, 0.7], dtype=torch.float64)
    (new_up, new_bias), (new_down,) = lab.fold_scales((up, bias), (down,), scales)
    gated = torch.nn.functional.silu(hidden @ gate.T)
    before = (gated * (hidden @ up.T + bias)) @ down.T
    after = (gated * (hidden @ new_up.T + new_bias)) @ new_down.T
    advice = "Row j of the producing layer makes feature j; divide rows, not columns."
    check_close("the output of the gated layer", after, before, scale=1e4, dtype=torch.float64, advice=advice)
    check_close("up_proj", new_up, up / scales[:, None], scale=10, dtype=torch.float64, advice=advice)


def test_powers_of_two_fold_without_rounding(lab: Any) -> None:
    scales = torch.tensor([0.25, 8.0, 1.0, 2.0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm, up, weight = (gaussian_weight(rows, 4, 65).to(dtype) for rows in (1, 4, 3))
        (new_norm, new_up), (new_weight,) = lab.fold_scales((norm[0], up), (weight,), scales)
        check_equal(f"the norm in {dtype}", new_norm, (norm[0].double() / scales.double()).to(dtype))
        check_equal(f"the linear layer in {dtype}", new_up, (up.double() / scales.double()[:, None]).to(dtype))
        check_equal(f"the weight in {dtype}", new_weight, (weight.double() * scales.double()).to(dtype))


def test_the_scales_lose_least(lab: Any) -> None:
    inputs = outlier_inputs(80, 70)
    # In the second weight the large features also have the larger weights: scaling up widens the steps of all others.
    plain, spiked = gaussian_weight(6, FEATURES, 71), gaussian_weight(3, FEATURES, 75)
    spiked[:, [5, 17]] *= 2
    seen = set()
    for what, weight in (("a plain weight", plain), ("large weights at large features", spiked)):
        for bits, group_size, grid, symmetric in (
            (3, 8, 20, True),
            (4, 24, 7, True),
            (4, 10, 20, False),
            (3, 8, 1, True),
        ):
            scales = search(lab, (weight,), inputs, bits, group_size, grid=grid, symmetric=symmetric)
            where = f"{what}, {bits} bits, groups of {group_size}, grid {grid}"
            seen.add(check_best(where, scales, (weight,), inputs, bits, group_size, grid, symmetric) / grid)
    assert 0.0 in seen and any(0 < exponent < 1 for exponent in seen), f"the test reaches too few exponents: {seen}"


def test_weights_that_share_inputs_share_the_decision(lab: Any) -> None:
    inputs = outlier_inputs(80, 73)
    weights = (gaussian_weight(5, FEATURES, 74), 2 * gaussian_weight(3, FEATURES, 75))
    alone = []
    for weight in weights:
        _, errors = scaling_errors((weight,), inputs, 3, 8, 20)
        alone.append(min(range(21), key=errors.__getitem__))
    best = check_best("two weights", search(lab, weights, inputs, 3, 8), weights, inputs, 3, 8, 20)
    assert best not in alone, f"the test's weights agree by themselves: {alone} and together {best}"


def test_of_equal_errors_the_least_scaling_wins(lab: Any) -> None:
    inputs = outlier_inputs(30, 76)
    ones = torch.ones(FEATURES, dtype=torch.float64)
    weight = gaussian_weight(4, FEATURES, 77)
    assert search(lab, (weight,), inputs, 3, 8, grid=3).std() > 0.1
    check_equal("the scales of a weight of zeros", search(lab, (0 * weight,), inputs, 4, 8), ones)
    # Numbers that 8 bits hold exactly: without scaling there is no error at all.
    exact = torch.randint(-127, 128, (4, FEATURES), generator=torch.Generator().manual_seed(78)).double()
    exact[:, ::8] = 127
    check_equal("the scales of a weight without any error", search(lab, (exact,), inputs, 8, 8), ones)


def test_dead_features_and_no_activation_at_all(lab: Any) -> None:
    inputs, weight = outlier_inputs(80, 80), gaussian_weight(6, FEATURES, 81)
    inputs[:, 3] = 0
    inputs[:, 11] *= 1e-7
    for unit in (1.0, 1e-6, 1e6):
        scales = search(lab, (weight,), unit * inputs, 3, 8)
        check_best(f"a dead feature, unit {unit:g}", scales, (weight,), inputs, 3, 8, 20)
    extremes = float(scales.max() * scales.min())
    assert abs(extremes - 1) < 1e-9, f"largest times smallest scale must be 1, got {extremes:.6g}"
    none = search(lab, (weight,), 0 * inputs, 3, 8)
    check_equal("the scales without any activation", none, torch.ones(FEATURES, dtype=torch.float64))
    weight[:, 8:16] = 0
    scales = search(lab, (weight,), inputs, 3, 8)
    check_best("a group of zeros", scales, (weight,), inputs, 3, 8, 20)


def test_half_precision_finds_the_same_scales(lab: Any) -> None:
    weight = gaussian_weight(6, FEATURES, 82).bfloat16()
    for dtype, unit in ((torch.float16, 300.0), (torch.bfloat16, 1.0), (torch.float32, 1.0)):
        inputs = (unit * outlier_inputs(80, 83)).to(dtype)
        scales = search(lab, (weight,), inputs.reshape(4, 20, FEATURES), 3, 8, grid=5)
        check_best(f"{dtype}", scales, (weight.double(),), inputs.double(), 3, 8, 5)


def test_outliers_are_worth_scaling_and_nothing_gets_worse(lab: Any) -> None:
    for seed in range(84, 90):
        inputs, weight = outlier_inputs(120, seed), gaussian_weight(8, FEATURES, seed)
        scales = search(lab, (weight,), inputs[:80], 3, 24, grid=10)
        for what, x, most in (("calibration", inputs[:80], 0.6), ("held-out", inputs[80:], 0.7)):
            error = output_error(weight, round_to_nearest(weight * scales, 3, 24) / scales, x)
            share = error / output_error(weight, round_to_nearest(weight, 3, 24), x)
            assert share < most, f"on {what} inputs the error should fall below {most} of plain rounding's: {share:.3f}"
        # Few tokens, features alike: little to gain, but never a loss.
        even = gaussian_weight(12, FEATURES, seed + 100)
        scales = search(lab, (weight,), even, 4, 8, grid=4)
        share = output_error(weight, round_to_nearest(weight * scales, 4, 8) / scales, even)
        share /= output_error(weight, round_to_nearest(weight, 4, 8), even)
        assert share <= 1 + 1e-12, f"α = 0 is one of the candidates, so nothing may get worse; it got {share:.3f}"


def test_inputs_that_awq_cannot_use_are_refused(lab: Any) -> None:
    inputs, weight = outlier_inputs(20, 90), gaussian_weight(4, FEATURES, 91)
    scales = search(lab, (weight,), inputs, 3, 8, grid=4)
    check_best("a good call", scales, (weight,), inputs, 3, 8, 4)
    for what, bad in (("NaN", torch.nan), ("infinity", -torch.inf)):
        spoilt = inputs.clone()
        spoilt[3, 1] = bad
        check_refused(f"{what} in inputs", lambda v=spoilt: search(lab, (weight,), v, 3, 8), mentions="inputs")
        check_refused(f"{what} in inputs", lambda v=spoilt: lab.salience(v), mentions="inputs")
        spoilt = weight.clone()
        spoilt[1, 2] = bad
        check_refused(f"{what} in a weight", lambda v=spoilt: search(lab, (weight, v), inputs, 3, 8), mentions="[1]")
    check_refused("no weight", lambda: search(lab, (), inputs, 3, 8))
    check_refused("no token", lambda: search(lab, (weight,), inputs[:0], 3, 8))
    check_refused("another width", lambda: search(lab, (weight[:, :9],), inputs, 3, 8))
    check_refused("1 bit", lambda: search(lab, (weight,), inputs, 1, 8), mentions="bits")
    check_refused("groups of 0", lambda: search(lab, (weight,), inputs, 3, 0), mentions="group_size")
    check_refused("a grid of 0", lambda: search(lab, (weight,), inputs, 3, 8, grid=0), mentions="grid")


def test_scales_that_cannot_be_folded_are_refused(lab: Any) -> None:
    norm, weight = gaussian_weight(1, 6, 92)[0], gaussian_weight(3, 6, 93)
    scales = torch.arange(1.0, 7.0, dtype=torch.float64)
    (folded,), _ = lab.fold_scales((norm,), (weight,), scales)
    check_close("a good call", folded, norm / scales, scale=3, dtype=torch.float64)
    # Two heads of v feed six inputs of o: grouped-query attention.
    check_refused(
        "v_proj of grouped-query attention", lambda: lab.fold_scales((weight[:2],), (weight,), scales), mentions="2"
    )
    check_refused("a weight of another width", lambda: lab.fold_scales((norm,), (weight[:, :5],), scales))
    check_refused("too few scales", lambda: lab.fold_scales((norm,), (weight,), scales[:5]))
    check_refused("nothing to fold into", lambda: lab.fold_scales((), (weight,), scales))
    check_refused("nothing that reads", lambda: lab.fold_scales((norm,), (), scales))
    for what, bad in (("0", 0.0), ("−1", -1.0), ("NaN", torch.nan), ("infinity", torch.inf)):
        spoilt = scales.clone()
        spoilt[2] = bad
        check_refused(f"a scale of {what}", lambda v=spoilt: lab.fold_scales((norm,), (weight,), v), mentions="scales")
    spoilt = weight.clone()
    spoilt[1, 2] = torch.nan
    check_refused("NaN in a weight", lambda: lab.fold_scales((norm,), (spoilt,), scales), mentions="weights")
    check_refused("NaN in a producer", lambda: lab.fold_scales((norm / 0,), (weight,), scales), mentions="producers")


@pytest.mark.integration
def test_your_own_rounding_makes_a_layer_with_awq(lab: Any) -> None:
    inputs, weight = outlier_inputs(80, 94), gaussian_weight(6, FEATURES, 95)
    norm = gaussian_weight(1, FEATURES, 96)[0]
    scales = lab.search_scales((weight,), inputs * norm, 3, 8)
    (new_norm,), (scaled,) = lab.fold_scales((norm,), (weight,), scales)
    rounded = lab.dequantize(lab.quantize(scaled, 3, group_size=8))
    error = ((inputs * norm) @ weight.T - (inputs * new_norm) @ rounded.T).square().sum() / 80
    _, errors = scaling_errors((weight,), inputs * norm, 3, 8, 20)
    check_close("the folded layer's error", error.reshape(1), torch.tensor([min(errors)], dtype=torch.float64),
                scale=1e3 * max(errors), dtype=torch.float64)  # fmt: skip
