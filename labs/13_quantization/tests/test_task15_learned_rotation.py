"""Task 15: what the loss and its gradient see, where steps end, and what learning gains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(15)

DOUBLE = torch.float64


def drawn(seed: int, *shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def orthogonal(seed: int, size: int) -> Tensor:
    """Any rotation, float64; far from symmetric."""
    return torch.linalg.qr(drawn(seed, size, size)).Q


def sylvester(seed: int, size: int) -> Tensor:
    """A Hadamard rotation of a size 2^k with random signs, float64."""
    matrix = torch.ones(1, 1, dtype=DOUBLE)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=DOUBLE), matrix)
    return drawn(seed, size, 1).sign() * matrix / math.sqrt(size)


def rounded(values: Tensor, bits: int) -> Tensor:
    """Each row on its own symmetric grid."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-300) / (2 ** (bits - 1) - 1)
    return (values / scale).round() * scale


def loss(weights: list[Tensor], inputs: Tensor, rotation: Tensor, bits: int) -> float:
    """The relative squared error of the outputs, float64."""
    x, r = inputs.double(), rotation.double()
    pairs = [(rounded(x @ r, bits) @ rounded(w.double() @ r, bits).T, x @ w.double().T) for w in weights]
    return float(sum((got - right).square().sum() for got, right in pairs) / sum(y.square().sum() for _, y in pairs))


def layers(seed: int, size: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Two weights and inputs with a few large channels."""
    sizes = drawn(seed, size).exp()
    sizes[3] *= 15
    inputs = drawn(seed + 1, tokens, size) * sizes
    inputs[:, 8] += 10
    return [drawn(seed + 2 + i, out, size, dtype=dtype) / math.sqrt(size) for i, out in enumerate((29, 18))], inputs.to(
        dtype
    )


def check_orthogonal(what: str, rotation: Tensor, size: int) -> None:
    """Within 10^-6, as float64."""
    check_form(what, rotation, (size, size), DOUBLE)
    error = float((rotation.T @ rotation - torch.eye(size, dtype=DOUBLE)).abs().max())
    assert error < 1e-6, f"{what}: RᵀR differs from the identity by {error:.3g}"


def test_rows_are_rounded_on_their_own_grids(lab: Any) -> None:
    values = drawn(1, 3, 5, 17)
    values[0, 0], values[0, 1], values[0, 2] = 0, values[0, 1].abs(), 2.5
    for bits in (2, 3, 4, 8):
        for dtype, wide in ((DOUBLE, DOUBLE), (torch.float32, torch.float32), (torch.float16, torch.float32)):
            given = values.to(dtype)
            got = lab.fake_quantize(given, bits)
            right = rounded(given.double(), bits)
            # Half a step is a place where two right answers differ; the few values there are left out.
            scale = given.double().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            clear = ((given.double() / scale.clamp(min=1e-300)) % 1 - 0.5).abs() > 1e-5
            check_form("fake_quantize", got, (3, 5, 17), wide)
            check_close(f"{bits} bits", torch.where(clear, got, right.to(wide)), right, scale=4.0, dtype=wide)
            again = lab.fake_quantize(got, bits)
            check_close("what is on the grid", again, got.double(), scale=4.0, dtype=wide, advice="It must stay.")


def test_the_gradient_knows_who_sets_the_scale(lab: Any) -> None:
    values, gradient = drawn(2, 6, 11), drawn(3, 6, 11)
    values[1] = -values[1].abs()
    for bits in (2, 4):
        top = 2 ** (bits - 1) - 1
        steps = values / (values.abs().amax(-1, keepdim=True) / top)
        # y = s · (x / s + const): dy/dx = 1, and dy/ds = round(x / s) − x / s, where s = |x_m| / top.
        slope = (gradient * (steps.round() - steps)).sum(-1, keepdim=True) / top
        largest = values.abs() == values.abs().amax(-1, keepdim=True)
        right = gradient + largest * values.sign() * slope
        (got,) = lab.vjp("fake_quantize", [values], gradient, bits=bits)
        advice = "round counts as the identity; the largest value moves the scale, and with it all others."
        check_close(f"the gradient with {bits} bits", got, right, scale=8.0, dtype=DOUBLE, inputs=[gradient],
                    advice=advice)  # fmt: skip
    (got,) = lab.vjp("fake_quantize", [torch.zeros(2, 5)], torch.ones(2, 5), bits=4)
    assert bool(got.isfinite().all()), f"rows of zeros have a gradient, too, got {got}"


def test_the_loss_is_the_error_of_the_outputs(lab: Any) -> None:
    weights, inputs = layers(4, 24, 40, DOUBLE)
    for bits in (3, 4, 8):
        for rotation in (torch.eye(24, dtype=DOUBLE), orthogonal(5, 24)):
            for chosen in (weights, weights[1:]):
                right = torch.tensor(loss(chosen, inputs, rotation, bits), dtype=DOUBLE)
                got = lab.rotation_loss(tuple(chosen), inputs, rotation, bits)
                check_close(f"the loss with {bits} bits", got, right, scale=100 * float(right), dtype=DOUBLE)
    small = [weight.float() for weight in weights]
    got = check_form(
        "the loss in float32", lab.rotation_loss(small, inputs.float(), orthogonal(5, 24), 4), (), torch.float32
    )
    right = loss(weights, inputs, orthogonal(5, 24), 4)
    assert abs(float(got) / right - 1) < 0.01, f"in float32 the loss is {float(got):.5g}, in float64 {right:.5g}"


def test_steps_of_any_length_stay_orthogonal(lab: Any) -> None:
    start, gradient = orthogonal(6, 20), drawn(7, 20, 20)
    for size in (1e-3, 0.3, 5.0, 1e4):
        rotation = lab.cayley_step(start, gradient, size)
        check_orthogonal(f"a step of {size}", rotation, 20)
        moved = float((rotation - start).norm())
        assert moved > 0.5 * min(size, 1.0), f"a step of {size} moved the rotation by {moved:.3g}"
        same = float(torch.linalg.det(rotation) / torch.linalg.det(start))
        assert same > 0.99, (
            f"a step of {size} turned a rotation into a reflection: the determinant is {same:.3g} of before"
        )
    rotation = start
    for seed in range(30):
        rotation = lab.cayley_step(rotation, drawn(seed, 20, 20), 0.5)
    check_orthogonal("30 steps", rotation, 20)
    small = check_form("a step in float32", lab.cayley_step(start.float(), gradient, 0.3), (20, 20), torch.float32)
    check_close("a step in float32", small, lab.cayley_step(start.float().double(), gradient, 0.3), scale=1.0,
                dtype=torch.float32)  # fmt: skip
    # G = R S with a symmetric S points away from the rotations; nothing along them changes.
    symmetric = gradient + gradient.T
    still = lab.cayley_step(start, start @ symmetric, 0.7)
    check_close("a gradient across the rotations", still, start, scale=100.0, dtype=DOUBLE, advice="Nothing to gain.")


def test_a_step_in_the_plane_turns_by_twice_the_arc_tangent(lab: Any) -> None:
    for angle in (0.0, 0.4, 2.5):
        for a, size in ((1.0, 0.3), (-2.0, 0.5), (0.3, 40.0)):
            start = torch.tensor(
                [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=DOUBLE
            )
            # G Rᵀ − R Gᵀ = [[0, −a], [a, 0]] for G = [[0, −a/2], [a/2, 0]] R.
            gradient = torch.tensor([[0.0, -a / 2], [a / 2, 0.0]], dtype=DOUBLE) @ start
            turned = angle - 2 * math.atan(size * a / 2)
            right = torch.tensor(
                [[math.cos(turned), -math.sin(turned)], [math.sin(turned), math.cos(turned)]], dtype=DOUBLE
            )
            got = lab.cayley_step(start, gradient, size)
            check_close(f"the step of {size}", got, right, scale=10.0, dtype=DOUBLE,
                        advice="(I + τ/2 A)⁻¹ (I − τ/2 A) R, with A = G Rᵀ − R Gᵀ.")  # fmt: skip


def test_a_step_goes_down_as_fast_as_the_gradient_says(lab: Any) -> None:
    for size in (5, 16):
        rotation, target = orthogonal(8, size), drawn(9, size, size)
        # f(R) = ⟨target, R⟩ has the gradient `target`.
        skew = target @ rotation.T - rotation @ target.T
        for step in (1e-4, 1e-5):
            change = float((target * (lab.cayley_step(rotation, target, step) - rotation)).sum()) / step
            right = -0.5 * float(skew.square().sum())
            assert abs(change / right - 1) < 100 * step * size, (
                f"per unit of step the loss changes by {change:.5g}; for short steps it should be −‖A‖²/2 = {right:.5g}"
            )


def test_a_learned_rotation_beats_where_it_began(lab: Any) -> None:
    weights, inputs = layers(10, 32, 250)
    seen, fresh, start = inputs[:120], inputs[120:], sylvester(11, 32)
    before = start.clone()
    learned = lab.learn_rotation(weights, seen, start)
    check_orthogonal("the learned rotation", learned, 32)
    check_equal("the start", start, before, "It must stay as it was.")
    for what, x, most in (("the calibration inputs", seen, 0.75), ("fresh inputs", fresh, 0.85)):
        got, first = loss(weights, x, learned, 4), loss(weights, x, start, 4)
        assert got < most * first, f"on {what} the loss fell from {first:.5f} to {got:.5f}; expected below {most} of it"
    again = lab.learn_rotation(weights, seen, start)
    check_equal("learning once more", again, learned, "The same start and inputs give the same rotation.")
    for bits, size in ((3, 32), (8, 16)):
        # In float64: where a search ends at the edge of a rounding, float32 may stand on the other side of it.
        weights, inputs = layers(20 + bits, size, 90, DOUBLE)
        start = sylvester(11, size)
        learned = lab.learn_rotation(weights, inputs, start, bits, 60)
        check_orthogonal(f"learned for {bits} bits", learned, size)
        got, first = loss(weights, inputs, learned, bits), loss(weights, inputs, start, bits)
        assert got < 0.9 * first, f"with {bits} bits the loss fell from {first:.3g} to {got:.3g}"


def test_learning_never_makes_it_worse(lab: Any) -> None:
    weights, inputs = layers(12, 32, 60, DOUBLE)
    start = lab.learn_rotation(weights, inputs, sylvester(13, 32), 4, 40)
    first = loss(weights, inputs, start, 4)
    assert first < 0.85 * loss(weights, inputs, sylvester(13, 32), 4), "40 steps from a Hadamard matrix must gain"
    for steps, size in ((0, 0.5), (1, 0.5), (3, 50.0), (5, 0.0), (8, 3.0)):
        learned = lab.learn_rotation(weights, inputs, start, 4, steps, size)
        check_orthogonal(f"{steps} steps of {size}", learned, 32)
        got = loss(weights, inputs, learned, 4)
        assert got < 1.001 * first, f"{steps} steps of {size} made the loss {got:.5f} from {first:.5f}; keep the best"
        if steps == 0 or size == 0:
            check_close("no step", learned, start, scale=1e4, dtype=DOUBLE, advice="Nothing is to change.")
    # One step that helps: it must be looked at, too.
    start = sylvester(13, 32)
    learned = lab.learn_rotation(weights, inputs, start, 4, 1, 0.05)
    got, first = loss(weights, inputs, learned, 4), loss(weights, inputs, start, 4)
    assert got < 0.999 * first, f"one small step lowers the loss of {first:.5f}; got {got:.5f}"


def test_layers_and_rotations_that_do_not_fit_are_refused(lab: Any) -> None:
    weights, inputs = layers(14, 16, 20)
    start = orthogonal(15, 16)
    good = float(lab.rotation_loss(weights, inputs, start, 4))
    assert abs(good / loss(weights, inputs, start, 4) - 1) < 0.01, "a good call first"
    check_orthogonal("a good call first", lab.learn_rotation(weights, inputs, start, 4, 2), 16)
    check_orthogonal("a good call first", lab.cayley_step(start, start @ start, 0.1), 16)
    nan = inputs.clone()
    nan[3, 4] = math.nan
    bad_weight = [weights[0], weights[1] * math.inf]
    for name, call in (("rotation_loss", lambda w, x, r: lab.rotation_loss(w, x, r, 4)),
                       ("learn_rotation", lambda w, x, r: lab.learn_rotation(w, x, r, 4, 2))):  # fmt: skip
        check_refused(f"{name} of NaN", lambda c=call: c(weights, nan, start), mentions="inputs")
        check_refused(f"{name} of infinite weights", lambda c=call: c(bad_weight, inputs, start), mentions="weights[1]")
        check_refused(f"{name} of no weights", lambda c=call: c([], inputs, start), mentions="weights")
        check_refused(f"{name} of other widths", lambda c=call: c([weights[0][:, :9]], inputs, start), mentions="9")
        check_refused(
            f"{name} with a small rotation", lambda c=call: c(weights, inputs, orthogonal(16, 9)), mentions="9"
        )
        check_refused(f"{name} where nothing comes out", lambda c=call: c([weights[0] * 0], inputs, start))
    for bits in (1, 9, 4.0):
        check_refused(f"{bits} bits", lambda b=bits: lab.rotation_loss(weights, inputs, start, b), mentions="bits")
        check_refused(f"{bits} bits", lambda b=bits: lab.fake_quantize(inputs, b), mentions="bits")
    check_refused("a start that stretches", lambda: lab.learn_rotation(weights, inputs, 2 * start), mentions="start")
    check_refused("a rotation that stretches", lambda: lab.cayley_step(2 * start, start, 0.1), mentions="rotation")
    check_refused("a gradient of another shape", lambda: lab.cayley_step(start, start[:, :4], 0.1), mentions="gradient")
    check_refused("an infinite gradient", lambda: lab.cayley_step(start, start * math.inf, 0.1), mentions="gradient")
    for size in (-0.1, math.nan, math.inf):
        check_refused(f"a step of {size}", lambda s=size: lab.cayley_step(start, start, s), mentions="step_size")
        check_refused(f"a step of {size}", lambda s=size: lab.learn_rotation(weights, inputs, start, 4, 2, s))
    check_refused("-1 steps", lambda: lab.learn_rotation(weights, inputs, start, 4, -1), mentions="steps")


@pytest.mark.integration
def test_your_own_learned_rotation_helps_your_own_quantizer(lab: Any) -> None:
    weights, inputs = layers(17, 36, 200)
    start = lab.random_rotation(36, 18)
    learned = lab.learn_rotation(weights, inputs[:100], start)
    errors, right = [], inputs[100:].double() @ weights[0].double().T
    for rotation in (start.float(), learned.float()):
        x = lab.dequantize(lab.quantize(inputs[100:] @ rotation, 4, granularity="token"))
        w = lab.dequantize(lab.quantize(weights[0] @ rotation, 4, granularity="channel"))
        errors.append(float((x.double() @ w.double().T - right).norm() / right.norm()))
    assert errors[1] < 0.92 * errors[0], (
        f"with your own quantizer the outputs err by {errors[0]:.4f} behind the Hadamard rotation and by "
        f"{errors[1]:.4f} behind the learned one"
    )
