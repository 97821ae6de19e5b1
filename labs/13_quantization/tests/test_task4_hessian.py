"""Task 4: the Hessian of a layer's squared error, the loss that it measures, and the factor of its inverse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.calibrated_reference import correlated_inputs, gaussian_weight, output_error
from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(4)


def check_factor(what: str, found: object, hessian: Tensor, damping: float) -> None:
    """The factor of (H + damping · mean(diag H) · I)⁻¹, for a Hessian without dead features."""
    assert isinstance(found, tuple) and len(found) == 2, f"{what}: expected (factor, damping used), got {found!r}"
    factor, used = found
    assert used == damping, f"{what}: damping {damping} should have been used, got {used!r}"
    factor = check_form(f"{what}: the factor", factor, tuple(hessian.shape), torch.float64)
    assert not bool(factor.tril(-1).any()), f"{what}: the factor must be 0 below its diagonal"
    damped = hessian.double() + damping * hessian.diagonal().double().mean() * torch.eye(len(hessian)).double()
    product = factor.T @ factor @ damped
    identity = torch.eye(len(hessian), dtype=torch.float64)
    check_close(
        f"{what}: UᵀU (H + damping)",
        product,
        identity,
        scale=float(torch.linalg.cond(damped)),
        dtype=torch.float64,
        advice="UᵀU, not UUᵀ, must be the inverse of the damped Hessian.",
    )


def test_the_hessian_is_a_mean_over_tokens(lab: Any) -> None:
    x = correlated_inputs(11, 5, 1) + torch.tensor([0.0, 3.0, 0.0, -2.0, 0.0], dtype=torch.float64)
    right = 2 * x.T @ x / 11
    hessian, count = None, 0
    for batch in (x[:3].reshape(3, 1, 5), x[3:9].reshape(2, 3, 5), x[9:10], x[10:]):
        before = None if hessian is None else hessian.clone()
        new, count = lab.update_hessian(hessian, count, batch)
        if hessian is not None and before is not None:
            check_equal("the hessian that was given", hessian, before, "It must not be changed.")
        hessian = new
    assert count == 11, f"eleven tokens were seen, got {count}"
    advice = "2 XᵀX over all tokens, divided by their number; each token counts the same, whatever its batch."
    check_close("the hessian of four batches", hessian, right, scale=40, dtype=torch.float64, advice=advice)
    single, count = lab.update_hessian(None, 0, x.float())
    check_close("the hessian of one batch", single, right, scale=40, dtype=torch.float32, advice=advice)
    assert count == 11, f"eleven tokens were seen, got {count}"


def test_half_precision_is_widened_first(lab: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = (300 * correlated_inputs(40, 4, 2)).to(dtype)
        hessian, count = lab.update_hessian(None, 0, x[:20])
        hessian, count = lab.update_hessian(hessian, count, x[20:])
        right = 2 * x.double().T @ x.double() / 40
        assert float(right.max()) > torch.finfo(torch.float16).max
        scale = float(right.abs().max())
        check_close(f"the hessian of {dtype}", hessian, right, scale=scale, dtype=torch.float32)


def test_the_layer_loss_is_the_error_of_the_outputs(lab: Any) -> None:
    x, weight = correlated_inputs(50, 6, 3), gaussian_weight(3, 6, 4)
    other = weight + 0.1 * gaussian_weight(3, 6, 5)
    hessian = 2 * x.T @ x / 50
    for what, candidate in (("another weight", other), ("no weight", torch.zeros_like(weight))):
        got, right = lab.layer_loss(weight, candidate, hessian), output_error(weight, candidate, x)
        assert isinstance(got, float), f"layer_loss must return a float, got {got!r}"
        assert abs(got - right) < 1e-12 * right, f"{what}: the outputs err by {right:.6g} a token, got {got:.6g}"
    half = weight.bfloat16()
    got, right = lab.layer_loss(half, other.bfloat16(), hessian.float()), output_error(half, other.bfloat16(), x)
    assert abs(got - right) < 1e-6 * right, f"bfloat16 weights err by {right:.6g} a token, got {got:.6g}"


def test_the_factor_inverts_the_damped_hessian(lab: Any) -> None:
    x = correlated_inputs(60, 7, 6, noise=1.0)
    hessian = 2 * x.T @ x / 60
    for unit in (1.0, 1e-6, 1e6):
        for damping in (0, 0.01, 0.3):
            found = lab.inverse_factor(hessian * unit, damping)
            check_factor(f"unit {unit:g}, damping {damping}", found, hessian * unit, damping)


def test_dead_features_have_no_part_in_the_damping(lab: Any) -> None:
    x = correlated_inputs(60, 6, 7, noise=1.0)
    alive = torch.tensor([0, 1, 3, 5])
    dead = torch.tensor([2, 4])
    x[:, dead] = 0
    hessian = 2e-4 * x.T @ x / 60
    found = lab.inverse_factor(hessian, 0.05)
    assert isinstance(found, tuple), f"expected (factor, damping used), got {found!r}"
    factor, used = found
    assert used == 0.05, f"damping 0.05 is enough, got {used!r}"
    part = factor[alive][:, alive]
    check_factor("the features that live", (part, used), hessian[alive][:, alive], 0.05)
    coupling = float(torch.stack([factor[alive][:, dead].T, factor[dead][:, alive]]).abs().max())
    assert coupling < 1e-12 * float(factor.abs().max()), "a dead feature is coupled to others"
    mean = float(hessian.diagonal()[alive].mean())
    right = torch.full((2,), mean**-0.5, dtype=torch.float64)
    check_close("the factor at dead features", factor.diagonal()[dead], right, scale=mean**-0.5, dtype=torch.float64)


def test_too_few_tokens_get_more_damping(lab: Any) -> None:
    x = correlated_inputs(9, 16, 8)
    hessian = 2 * x.T @ x / 9
    for given in (hessian, hessian.float()):
        for damping in (0, 1e-12):
            check_factor(f"damping {damping:g}, 9 tokens", lab.inverse_factor(given, damping), given, 0.01)
        check_factor("damping 0.02", lab.inverse_factor(given, 0.02), given, 0.02)
    # Not quite XᵀX: an eigenvalue lies at −0.05 times the mean diagonal.
    values, vectors = torch.linalg.eigh(hessian)
    values[0] = -0.05 * float(hessian.diagonal().mean())
    bent = vectors * values @ vectors.T
    bent = (bent + bent.T) / 2
    check_factor("a Hessian with a negative eigenvalue", lab.inverse_factor(bent, 0.01), bent, 0.1)
    assert lab.inverse_factor(torch.tensor([[1.0, 9.0], [9.0, 1.0]]), 0.01) is None, "no damping up to 1 helps here"
    assert lab.inverse_factor(torch.zeros(3, 3), 0.01) is None, "there was no activation at all"


def test_what_is_no_hessian_is_refused(lab: Any) -> None:
    x, weight = correlated_inputs(20, 4, 9), gaussian_weight(3, 4, 10)
    hessian, count = lab.update_hessian(None, 0, x)
    check_close("a good call", hessian, 2 * x.T @ x / 20, scale=20, dtype=torch.float64)
    for what, bad in (("NaN", torch.nan), ("infinity", torch.inf)):
        spoilt = x.clone()
        spoilt[3, 1] = bad
        check_refused(f"{what} in inputs", lambda v=spoilt: lab.update_hessian(None, 0, v), mentions="inputs")
        spoilt = hessian.clone()
        spoilt[1, 2] = spoilt[2, 1] = bad
        check_refused(f"{what} in hessian", lambda v=spoilt: lab.inverse_factor(v, 0.01), mentions="hessian")
        check_refused(f"{what} in hessian", lambda v=spoilt: lab.layer_loss(weight, weight, v), mentions="hessian")
        spoilt = weight.clone()
        spoilt[1, 2] = bad
        check_refused(f"{what} in weight", lambda v=spoilt: lab.layer_loss(v, weight, hessian), mentions="weight")
    check_refused("no token", lambda: lab.update_hessian(None, 0, x[:0]))
    check_refused("another width", lambda: lab.update_hessian(hessian, count, x[:, :3]))
    check_refused("a count without a hessian", lambda: lab.update_hessian(None, 5, x))
    check_refused("a hessian without a count", lambda: lab.update_hessian(hessian, 0, x))
    check_refused("no square", lambda: lab.inverse_factor(x, 0.01))
    check_refused("no symmetry", lambda: lab.inverse_factor(hessian.triu(), 0.01))
    check_refused("a negative square", lambda: lab.inverse_factor(hessian - 99 * torch.eye(4).double(), 0.01))
    for damping in (-0.01, torch.nan, torch.inf):
        check_refused(f"damping {damping}", lambda d=damping: lab.inverse_factor(hessian, d), mentions="damping")
    check_refused("two shapes", lambda: lab.layer_loss(weight, weight[:2], hessian))
    check_refused("a hessian of another width", lambda: lab.layer_loss(weight[:, :3], weight[:, :3], hessian))
