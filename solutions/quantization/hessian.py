"""Task 4a: what calibration tells about a linear layer, and what it costs to change the layer's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_finite, check_matrix

MORE_DAMPING = (0.01, 0.1, 1.0)
"""Tried in this order, if larger than the damping asked for, when a Hessian can't be inverted with that."""

SMALLEST_PIVOT = 1e-6
"""Of the mean diagonal: less is what float32 leaves of 0, and its inverse would be noise."""


def update_hessian(hessian: Tensor | None, count: int, inputs: Tensor) -> tuple[Tensor, int]:
    """Take more activations into the Hessian of a layer's squared output error, H = 2 XᵀX / count.

    Args:
        hessian: of the tokens so far, `[in, in]`; None at the start. Is not changed.
        count: tokens so far, 0 at the start.
        inputs: what the layer reads, floating point `[..., in]`, at least one token. Half precision is widened first:
            its squares would overflow.

    Returns:
        The Hessian over all tokens, `[in, in]`, float64 for float64 inputs, else float32; and their number.

    Raises:
        ValueError: inputs that aren't finite or hold no token, a Hessian of another width, or a count that does not
            fit to it.

    Source: Frantar et al. 2022 (2210.17323), section 3; module section 4.3.
    """
    check_count("count", count, 0)
    if inputs.dim() < 2 or inputs.numel() == 0:
        raise ValueError(f"inputs must be [..., in] with at least one token, got shape {list(inputs.shape)}")
    check_finite("inputs", inputs)
    if (hessian is None) != (count == 0):
        given = "no hessian" if hessian is None else "a hessian"
        raise ValueError(f"a hessian comes with the count of its tokens, and none with 0, got {given} and {count}")
    if hessian is not None:
        check_hessian(hessian, inputs.shape[-1])
    # BEGIN SOLUTION
    x = inputs.flatten(0, -2).to(torch.promote_types(inputs.dtype, torch.float32))
    total = count + x.shape[0]
    fresh = x.T @ (x * (2 / total))
    return (fresh if hessian is None else hessian * (count / total) + fresh), total
    # END SOLUTION


def layer_loss(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    """The squared error of a layer's outputs, summed over its rows and averaged over the calibration tokens.

    Args:
        weight: `[rows, in]`.
        approximation: what stands in for it, same shape.
        hessian: of `update_hessian`, `[in, in]`.

    Returns:
        ½ tr(Δ H Δᵀ) with Δ = weight − approximation, which is ‖X Δᵀ‖² / count; computed in float64.

    Raises:
        ValueError: shapes that don't fit, or numbers that aren't finite.
    """
    check_matrix("weight", weight)
    check_matrix("approximation", approximation)
    if weight.shape != approximation.shape:
        raise ValueError(
            f"weight and approximation must have one shape, got {list(weight.shape)} and {list(approximation.shape)}"
        )
    check_hessian(hessian, weight.shape[1])
    # BEGIN SOLUTION
    difference = weight.double() - approximation.double()
    return 0.5 * float((difference @ hessian.double() * difference).sum())
    # END SOLUTION


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float] | None:
    """The upper Cholesky factor of the damped Hessian's inverse: Uᵀ U = (H + damping · mean(diag H) · I)⁻¹.

    A Hessian of fewer tokens than features is singular, and damping makes it regular. Where the damping asked for is
    too little, the larger ones of `MORE_DAMPING` are tried. A feature that was 0 in all tokens is dead: it has no part
    in the mean and gets the mean as its diagonal; nothing couples it to the others.

    Args:
        hessian: `[in, in]`.
        damping: share of the mean diagonal that is added to the diagonal, at least 0.

    Returns:
        U, float64 `[in, in]`, 0 below the diagonal; and the damping that was used. None if there was no activation at
        all, or nothing tried makes the matrix positive definite (it is no XᵀX then).

    Raises:
        ValueError: a matrix that can't be a Hessian, or a damping that isn't a finite number of at least 0.

    Source: Frantar et al. 2022 (2210.17323), section 3.3.
    """
    check_hessian(hessian, None)
    check_damping(damping)
    # BEGIN SOLUTION
    wide = hessian.double()
    alive = wide.diagonal() > 0
    if not bool(alive.any()):
        return None
    mean = wide.diagonal()[alive].mean()
    for share in (damping, *(more for more in MORE_DAMPING if more > damping)):
        damped = wide + torch.where(alive, share * mean, mean).diag()
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed or float(lower.diagonal().min()) ** 2 < SMALLEST_PIVOT * float(mean):
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper, share
    return None
    # END SOLUTION


def check_hessian(hessian: Tensor, width: int | None) -> None:
    """Refuse a matrix that can't be XᵀX of activations with `width` features; None allows any number.

    Raises:
        ValueError: not square, of another width, not symmetric, negative on the diagonal, or not finite.
    """
    check_matrix("hessian", hessian)
    side = hessian.shape[1] if width is None else width
    if tuple(hessian.shape) != (side, side):
        raise ValueError(f"hessian must be [{side}, {side}], one row a feature, got {list(hessian.shape)}")
    if bool((hessian.diagonal() < 0).any()):
        feature = int((hessian.diagonal() < 0).nonzero()[0])
        raise ValueError(
            f"hessian holds {float(hessian[feature, feature]):.3g} at [{feature}, {feature}], but a sum of squares "
            "is at least 0"
        )
    if float((hessian - hessian.T).abs().max()) > 1e-3 * float(hessian.abs().max()):
        raise ValueError("hessian must be symmetric; give XᵀX of the activations, see update_hessian")


def check_damping(damping: float) -> None:
    """Refuse a damping that would not move a Hessian towards the identity.

    Raises:
        ValueError: it isn't a finite number of at least 0.
    """
    if isinstance(damping, bool) or not isinstance(damping, (int, float)) or not 0 <= damping < float("inf"):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
