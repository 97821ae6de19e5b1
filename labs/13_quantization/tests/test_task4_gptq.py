"""Task 4: which value each column is rounded from, what its group's scale is taken from, and what that is worth.

Expected codes come from the least-squares problem itself, solved anew before each rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.calibrated_reference import (
    compensated_rounding,
    correlated_inputs,
    gaussian_weight,
    nearest_codes,
    nearest_params,
    output_error,
    round_to_nearest,
    values_of,
)
from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused
from labkit.quantized import QuantizedTensor

pytestmark = pytest.mark.task(4)

COLUMNS = 22
WEIGHT = gaussian_weight(5, COLUMNS, 40)
INPUTS = correlated_inputs(200, COLUMNS, 41)
HESSIAN = 2 * INPUTS.T @ INPUTS / 200


def run(lab: Any, weight: Tensor, hessian: Tensor, bits: int, group_size: int, **options: Any) -> QuantizedTensor:
    """GPTQ with task 1's functions given, which must have no reason to warn."""
    warnings: list[str] = []
    given = {"group_params": nearest_params, "to_codes": nearest_codes, "warn": warnings.append, **options}
    q = lab.gptq(weight, hessian, bits, group_size, **given)
    assert isinstance(q, QuantizedTensor), f"gptq must return a QuantizedTensor, got {type(q).__name__}"
    assert not warnings, f"nothing is wrong with this Hessian, but it warned: {warnings[0]}"
    assert (q.bits, q.group_size) == (bits, group_size), f"bits and group_size are {q.bits} and {q.group_size}"
    assert q.codes.shape == weight.shape, f"codes have shape {list(q.codes.shape)}, the weight {list(weight.shape)}"
    assert not q.codes.is_floating_point(), f"codes must be integers, got {q.codes.dtype}"
    assert q.scale.shape == (len(weight), -(-weight.shape[1] // group_size)), f"scale has shape {list(q.scale.shape)}"
    return q


def check_as_derived(
    what: str, q: QuantizedTensor, weight: Tensor, hessian: Tensor, advice: str = "", **options: Any
) -> None:
    """Codes equal to those of the problem solved directly, scales as close as float64 allows."""
    right = compensated_rounding(weight, hessian, q.bits, q.group_size, **options)
    assert right.margin > 1e-9, "the test's own numbers lie too near to a tie"
    size = float(right.scale.max())
    check_close(f"{what}: scale", q.scale, right.scale, scale=1e4 * size, dtype=torch.float64, advice=advice)
    if right.zero_point is not None:
        assert q.zero_point is not None, f"{what}: a zero point was asked for"
        check_equal(f"{what}: zero point", q.zero_point.long(), right.zero_point.long(), advice)
    else:
        assert q.zero_point is None, f"{what}: symmetric codes have no zero point"
    check_equal(f"{what}: codes", q.codes.long(), right.codes, advice)


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_each_column_is_rounded_from_its_best_value(lab: Any, bits: int) -> None:
    q = run(lab, WEIGHT, HESSIAN, bits, COLUMNS)
    advice = "Column i is rounded from what the errors of columns 0 … i − 1 have made of it, e_i U_ij each."
    check_as_derived(f"{bits} bits, one group", q, WEIGHT, HESSIAN, advice)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_s_scale_comes_from_updated_weights(lab: Any, symmetric: bool) -> None:
    # 22 columns in groups of 8: the last group is short.
    advice = "A group's scale is taken when its first column is up, from all its columns as they are then."
    for bits, group_size in ((4, 8), (3, 5)):
        q = run(lab, WEIGHT, HESSIAN, bits, group_size, symmetric=symmetric)
        what = f"{bits} bits, groups of {group_size}, {'symmetric' if symmetric else 'with zero point'}"
        check_as_derived(what, q, WEIGHT, HESSIAN, advice, symmetric=symmetric)


def test_eight_bits_with_a_zero_point_keep_all_codes(lab: Any) -> None:
    q = run(lab, WEIGHT + 1, HESSIAN, 8, 8, symmetric=False)
    assert int(q.codes.max()) > 127, "codes reach 255, which an int8 does not hold"
    check_as_derived("8 bits with zero point", q, WEIGHT + 1, HESSIAN, symmetric=False)


def test_the_answer_does_not_depend_on_the_block_size(lab: Any) -> None:
    advice = "Errors of a block that is not finished yet count too, also for the scale of a group that reaches beyond."
    for block_size in (1, 3, 8, 12, 21, 500):
        q = run(lab, WEIGHT, HESSIAN, 4, 8, block_size=block_size)
        check_as_derived(f"blocks of {block_size}, groups of 8", q, WEIGHT, HESSIAN, advice)
    q = run(lab, WEIGHT, HESSIAN, 4, COLUMNS, block_size=4)
    check_as_derived("blocks of 4, one group", q, WEIGHT, HESSIAN, advice)


def test_damping_is_a_share_of_the_mean_diagonal(lab: Any) -> None:
    for damping in (0, 0.01, 0.5, 20.0):
        for unit in (1.0, 1e-5, 1e5):
            q = run(lab, WEIGHT, HESSIAN * unit, 3, 8, damping=damping)
            advice = "Add damping · mean(diag H) to the diagonal, and to nothing else."
            check_as_derived(f"damping {damping}, unit {unit:g}", q, WEIGHT, HESSIAN * unit, advice, damping=damping)


def test_act_order_keeps_the_weight_s_own_order(lab: Any) -> None:
    advice = "Codes and groups stand in the weight's order; only the order of rounding follows the diagonal."
    for group_size, block_size in ((COLUMNS, 128), (8, 128), (8, 3), (1, 5)):
        q = run(lab, WEIGHT, HESSIAN, 3, group_size, act_order=True, block_size=block_size)
        what = f"act order, groups of {group_size}, blocks of {block_size}"
        check_as_derived(what, q, WEIGHT, HESSIAN, advice, act_order=True)
    q = run(lab, WEIGHT, HESSIAN, 4, 8, act_order=True, symmetric=False)
    check_as_derived("act order with zero point", q, WEIGHT, HESSIAN, advice, act_order=True, symmetric=False)
    # Where all columns share a scale, it can't matter in which order they are stored.
    turn = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(42))
    straight = run(lab, WEIGHT, HESSIAN, 4, COLUMNS, act_order=True)
    turned = run(lab, WEIGHT[:, turn], HESSIAN[turn][:, turn], 4, COLUMNS, act_order=True)
    check_equal("codes of permuted columns", turned.codes.long(), straight.codes[:, turn].long(), advice)


@pytest.mark.parametrize("symmetric", [True, False])
def test_dead_features_become_zero(lab: Any, symmetric: bool) -> None:
    dead = torch.tensor([0, 9, 16, 17, 18, 19, 20, 21])  # the whole of the last two groups of 4, but two columns
    inputs = INPUTS.clone()
    inputs[:, dead] = 0
    weight = WEIGHT.clone()
    weight[:, dead] = 50.0
    for unit, act_order in ((1.0, False), (1e-6, False), (1.0, True)):
        hessian = unit * 2 * inputs.T @ inputs / 200
        for damping in (0.01, 0):
            q = run(lab, weight, hessian, 4, 4, symmetric=symmetric, damping=damping, act_order=act_order)
            value = values_of(q)
            assert bool(value.isfinite().all()), "a dead feature has made a weight NaN or infinite"
            assert not bool(value[:, dead].any()), "weights of features that never were anything but 0 must become 0"
            assert float(q.scale.max()) < 3, "dead weights must not widen the scale of their group"
            options = {"symmetric": symmetric, "damping": damping, "act_order": act_order}
            check_as_derived(f"dead features, unit {unit:g}, damping {damping}", q, weight, hessian, **options)


def test_outputs_change_less_than_by_rounding_to_nearest(lab: Any) -> None:
    features = 48
    inputs = correlated_inputs(600, features, 43)
    calibration, held_out = inputs[:400], inputs[400:]
    hessian = 2 * calibration.T @ calibration / 400
    weight = gaussian_weight(12, features, 44)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given = weight.to(dtype)
        for bits in (8, 4, 3):
            q = run(lab, given, hessian.float(), bits, 16)
            wide = torch.promote_types(dtype, torch.float32)
            assert q.scale.dtype == wide, f"the scale of a {dtype} weight must be {wide}, got {q.scale.dtype}"
            value, plain = values_of(q), round_to_nearest(given.double(), bits, 16)
            for what, x in (("calibration", calibration), ("held-out", held_out)):
                share = output_error(given, value, x) / output_error(given, plain, x)
                assert 0 < share < 0.5, (
                    f"{bits} bits, {dtype}: on {what} inputs with few sources the outputs' squared error should fall "
                    f"to less than half of plain rounding's, it is {share:.3f} of it"
                )


def test_fewer_tokens_than_features_still_help(lab: Any) -> None:
    inputs = correlated_inputs(15, COLUMNS, 45)
    for hessian in (2 * inputs.T @ inputs / 15, (2 * inputs.T @ inputs / 15).float()):
        for damping, used in ((0.01, 0.01), (0, 0.01), (1e-10, 0.01), (0.1, 0.1)):
            q = run(lab, WEIGHT, hessian, 3, 8, damping=damping)
            share = output_error(WEIGHT, values_of(q), inputs) / output_error(
                WEIGHT, round_to_nearest(WEIGHT, 3, 8), inputs
            )
            assert 0 < share < 0.6, f"damping {damping}: the error is {share:.3g} of plain rounding's, expected < 0.6"
            if hessian.dtype == torch.float64:
                advice = "A singular Hessian is damped more: with 0.01, 0.1 or 1 of the mean diagonal."
                check_as_derived(f"15 tokens, damping {damping}", q, WEIGHT, hessian, advice, damping=used)


def test_without_a_usable_hessian_it_rounds_to_nearest_and_says_so(lab: Any) -> None:
    bent = torch.eye(COLUMNS, dtype=torch.float64)
    bent[3, 5] = bent[5, 3] = 9.0
    for what, hessian in (("no activation", torch.zeros(COLUMNS, COLUMNS)), ("no XᵀX", bent)):
        for act_order in (False, True):
            said: list[str] = []
            q = run(lab, WEIGHT, hessian, 4, 8, warn=said.append, act_order=act_order)
            assert len(said) == 1 and isinstance(said[0], str), f"{what}: expected one warning, got {said}"
            right = round_to_nearest(WEIGHT, 4, 8)
            check_close(f"{what}: the weights", values_of(q), right, scale=2, dtype=torch.float64)


def test_rows_and_groups_of_zeros_stay_zero(lab: Any) -> None:
    weight = WEIGHT.clone()
    weight[2] = 0
    for symmetric in (True, False):
        q = run(lab, weight, HESSIAN, 4, 8, symmetric=symmetric)
        value = values_of(q)
        assert bool(value.isfinite().all()) and bool((q.scale > 0).all()), "a row of zeros has made NaN or a scale of 0"
        assert not bool(value[2].any()), "a row of zeros must stay zero"
        check_as_derived("a row of zeros", q, weight, HESSIAN, symmetric=symmetric)


def test_arguments_that_do_not_fit_are_refused(lab: Any) -> None:
    check_as_derived("a good call", run(lab, WEIGHT, HESSIAN, 4, 8), WEIGHT, HESSIAN)
    for what, bad in (("NaN", torch.nan), ("infinity", torch.inf)):
        spoilt = WEIGHT.clone()
        spoilt[1, 2] = bad
        check_refused(f"{what} in weight", lambda v=spoilt: run(lab, v, HESSIAN, 4, 8), mentions="weight")
        spoilt = HESSIAN.clone()
        spoilt[2, 2] = bad
        check_refused(f"{what} in hessian", lambda v=spoilt: run(lab, WEIGHT, v, 4, 8), mentions="hessian")
    check_refused("a weight of another width", lambda: run(lab, WEIGHT[:, :9], HESSIAN, 4, 8), mentions="hessian")
    check_refused("inputs for a hessian", lambda: run(lab, WEIGHT, INPUTS, 4, 8), mentions="hessian")
    check_refused("a row for a weight", lambda: run(lab, WEIGHT[0], HESSIAN, 4, 8), mentions="weight")
    for bits in (1, 9, 4.0):
        check_refused(f"{bits} bits", lambda b=bits: run(lab, WEIGHT, HESSIAN, b, 8), mentions="bits")
    for size in (0, -1, 8.0):
        check_refused(f"groups of {size}", lambda n=size: run(lab, WEIGHT, HESSIAN, 4, n), mentions="group_size")
        check_refused(
            f"blocks of {size}", lambda n=size: run(lab, WEIGHT, HESSIAN, 4, 8, block_size=n), mentions="block_size"
        )
    check_refused("damping −1", lambda: run(lab, WEIGHT, HESSIAN, 4, 8, damping=-1.0), mentions="damping")


@pytest.mark.integration
def test_your_own_rounding_and_hessian_drive_gptq(lab: Any) -> None:
    hessian, count = None, 0
    for batch in INPUTS.float().split(64):
        hessian, count = lab.update_hessian(hessian, count, batch)
    weight = WEIGHT.float()
    for bits in (8, 4, 3):
        plain = lab.layer_loss(weight, lab.dequantize(lab.quantize(weight, bits, group_size=8)), hessian)
        loss = lab.layer_loss(weight, lab.dequantize(lab.gptq(weight, hessian, bits, 8)), hessian)
        right = compensated_rounding(WEIGHT, HESSIAN, bits, 8)
        value = values_of(QuantizedTensor(right.codes, right.scale, None, bits, 8))
        wanted = output_error(WEIGHT, value, INPUTS)
        assert 0.9 * wanted < loss < 1.1 * wanted < plain, (
            f"{bits} bits: GPTQ should lose {wanted:.3g}, it loses {loss:.3g}; plain rounding loses {plain:.3g}"
        )
