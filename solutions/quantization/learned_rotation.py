"""Task 15: SpinQuant: a rotation that is learned, by steps that never leave the rotations."""

from __future__ import annotations

# BEGIN SOLUTION
import math

# END SOLUTION
from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_bits, check_finite, check_matrix
from labkit.rotation_checks import check_rotation


def fake_quantize(values: Tensor, bits: int) -> Tensor:
    """Each row on its own symmetric grid, as floats, with a gradient.

    Args:
        values: `[..., n]` finite floats; computed in at least float32.
        bits: 2 to 8.

    Returns:
        scale · round(value / scale) with scale = max |value| / (2^(bits−1) − 1) of the row; rows of zeros stay zeros.
        Of the same shape, in at least float32. The gradient takes round for the identity (straight through), and
        counts in that the largest value of a row moves the scale of all others: only so does it know outliers.

    Raises:
        ValueError: no finite floats, or bits outside of 2 to 8.

    Source: module section 4.1; Bengio et al. 2013 (1308.3432) for the gradient of round.
    """
    check_finite("values", values)
    check_bits(bits)
    # BEGIN SOLUTION
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1, largest / (2 ** (bits - 1) - 1))
    steps = values / scale
    return scale * (steps + (steps.round() - steps).detach())
    # END SOLUTION


def rotation_loss(weights: Sequence[Tensor], inputs: Tensor, rotation: Tensor, bits: int) -> Tensor:
    """What quantization does to layers that read rotated inputs: Σ ‖q(X R) q(W R)ᵀ − X Wᵀ‖² / Σ ‖X Wᵀ‖².

    Args:
        weights: of layers that read the same inputs, `[out, in]` each, at least one; rows are output channels.
        inputs: X, a token in each row, `[tokens, in]`.
        rotation: R, `[in, in]`.
        bits: of both operands; q is `fake_quantize`.

    Returns:
        A number `[]` in at least float32 (inputs in float64: float64), with a gradient for `rotation`.

    Raises:
        ValueError: operands that aren't finite matrices of one width, a rotation of another size, bits outside of 2
            to 8, or layers whose outputs are all 0.

    Source: Liu et al. 2024 (2405.16406), with the error of single layers in place of the whole model's loss.
    """
    _check_layers(weights, inputs)
    check_finite("rotation", rotation)
    if rotation.shape != (inputs.shape[1], inputs.shape[1]):
        raise ValueError(f"rotation must be [{inputs.shape[1]}, {inputs.shape[1]}], got {list(rotation.shape)}")
    check_bits(bits)
    # BEGIN SOLUTION
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    x, r = inputs.to(dtype), rotation.to(dtype)
    read = fake_quantize(x @ r, bits)
    error, size = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
    for weight in weights:
        right = x @ weight.to(dtype).T
        error = error + (read @ fake_quantize(weight.to(dtype) @ r, bits).T - right).square().sum()
        size = size + right.square().sum()
    return error / size
    # END SOLUTION


def cayley_step(rotation: Tensor, gradient: Tensor, step_size: float) -> Tensor:
    """A step against the gradient that ends at a rotation again, however long it is.

    With the skew matrix A = G Rᵀ − R Gᵀ it is R' = (I + τ/2 · A)⁻¹ (I − τ/2 · A) R, and the loss changes by
    −τ/2 · ‖A‖² for small τ.

    Args:
        rotation: R, orthogonal, `[n, n]`.
        gradient: G, of the loss by the entries of R as if they were free, `[n, n]`.
        step_size: τ, finite, at least 0.

    Returns:
        R', in the dtype of `rotation`; computed in float64, so that many steps don't add up to a stretch.

    Raises:
        ValueError: a rotation that isn't orthogonal, a gradient of another shape or not finite, or a step size that
            is negative or not finite.

    Source: Wen & Yin 2013; Li et al. 2020 (2002.01113); Liu et al. 2024 (2405.16406), section 3.2.
    """
    check_matrix("rotation", rotation)
    check_rotation("rotation", rotation, rotation.shape[0])
    check_finite("gradient", gradient)
    if gradient.shape != rotation.shape:
        raise ValueError(f"gradient must have the shape {list(rotation.shape)}, got {list(gradient.shape)}")
    _check_step_size(step_size)
    # BEGIN SOLUTION
    r, half = rotation.double(), step_size / 2 * _skew(rotation, gradient)
    identity = torch.eye(len(r), dtype=torch.float64)
    return torch.linalg.solve(identity + half, r - half @ r).to(rotation.dtype)
    # END SOLUTION


def learn_rotation(
    weights: Sequence[Tensor],
    inputs: Tensor,
    start: Tensor,
    bits: int = 4,
    steps: int = 100,
    step_size: float = 0.5,
) -> Tensor:
    """The best rotation that a number of steps from a given one finds on calibration inputs.

    Args:
        weights: as in `rotation_loss`.
        inputs: as in `rotation_loss`; a few hundred tokens.
        start: where to begin, such as `random_rotation`.
        bits: as in `rotation_loss`.
        steps: number of steps, at least 0.
        step_size: of the first step, in radians: τ ‖A‖ / √2, which is the angle where one plane turns. It falls to 0
            evenly, so that the last steps only settle.

    Returns:
        `[in, in]` float64, orthogonal within 10⁻⁶. Its loss is that of `start` or less.

    Raises:
        ValueError: what `rotation_loss` and `cayley_step` refuse, or steps that are no int of at least 0.

    Source: Liu et al. 2024 (2405.16406), section 3.
    """
    _check_layers(weights, inputs)
    check_rotation("start", start, inputs.shape[1])
    check_bits(bits)
    check_count("steps", steps, 0)
    _check_step_size(step_size)
    # BEGIN SOLUTION
    rotation = best = start.detach().double()
    least = math.inf
    for step in range(steps + 1):
        variable = rotation.clone().requires_grad_()
        with torch.enable_grad():
            loss = rotation_loss(weights, inputs, variable, bits)
        if loss.item() < least:
            best, least = rotation, loss.item()
        (gradient,) = torch.autograd.grad(loss, variable)
        length = float(_skew(rotation, gradient).norm()) / math.sqrt(2)
        if step == steps or length == 0:
            break
        rotation = cayley_step(rotation, gradient, step_size * (1 - step / steps) / length)
    return best
    # END SOLUTION


def _check_layers(weights: Sequence[Tensor], inputs: Tensor) -> None:
    """Refuses layers that don't read these inputs, or from which nothing comes."""
    check_matrix("inputs", inputs)
    if not weights:
        raise ValueError("weights must hold at least one matrix, got none")
    for index, weight in enumerate(weights):
        check_matrix(f"weights[{index}]", weight)
        if weight.shape[1] != inputs.shape[1]:
            raise ValueError(f"weights[{index}] has {weight.shape[1]} columns, the inputs have {inputs.shape[1]}")
    if not any(bool((inputs.double() @ weight.double().T).any()) for weight in weights):
        raise ValueError("the outputs of all layers are 0; the error has nothing to be measured by")


def _check_step_size(step_size: float) -> None:
    """Refuses what is no length."""
    if isinstance(step_size, bool) or not isinstance(step_size, int | float) or not 0 <= step_size < float("inf"):
        raise ValueError(f"step_size must be a finite number of at least 0, got {step_size!r}")


# BEGIN SOLUTION
def _skew(rotation: Tensor, gradient: Tensor) -> Tensor:
    """A = G Rᵀ − R Gᵀ, float64: −A R is the steepest way down that stays among the rotations."""
    product = gradient.double() @ rotation.double().T
    return product - product.T


# END SOLUTION
