"""Tolerances that follow from the arithmetic instead of from habit.

The error of a tensor is its largest deviation from a float64 reference. A result may err twice as much as plain
PyTorch in the same dtype does on the same inputs, plus a few roundings of the quantity's own scale. A bound on every
element alone, or a bare factor of two, rejects correct code that happens to round elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PLAIN_FACTOR = 2.0
ROUNDINGS = 8.0


def error_bound(reference: Tensor, plain: Tensor | None, scale: float, dtype: torch.dtype) -> float:
    """The largest deviation from the reference that correct code may show.

    Args:
        reference: the result in float64.
        plain: the result of plain PyTorch in `dtype`; None, or a result that overflowed, counts as exact.
        scale: size of the quantity, stated by the test (for attention max |V|).
        dtype: of the judged result.

    Returns:
        2 · error(plain) + 8 · eps · scale.
    """
    bound = ROUNDINGS * torch.finfo(dtype).eps * scale
    if plain is not None and bool(plain.isfinite().all()):
        bound += PLAIN_FACTOR * largest_error(plain, reference)
    return bound


def largest_error(actual: Tensor, reference: Tensor) -> float:
    """max |actual − reference| in float64; 0 for empty tensors."""
    if actual.numel() == 0:
        return 0.0
    return float((actual.double() - reference.double()).abs().max())


def check_close(
    what: str,
    actual: object,
    reference: Tensor,
    *,
    scale: float,
    dtype: torch.dtype,
    plain: Tensor | None = None,
    inputs: Sequence[Tensor] = (),
    advice: str = "",
) -> None:
    """Fail unless a tensor is as close to its float64 reference as its dtype allows.

    Args:
        what: name of the result, which starts every message.
        actual: what the code under test returned.
        reference: the right result in float64, of the shape wanted.
        scale: size of the quantity, for the bound.
        dtype: the dtype wanted.
        plain: the result of plain PyTorch in that dtype, for the bound.
        inputs: tensors that `actual` must not simply repeat.
        advice: what to look at when the values are off; ends the message.

    Raises:
        AssertionError: wrong type, shape or dtype; NaN; all zeros, one value throughout or a copy of an input
            where the reference is none of these; or an error above the bound.
    """
    tensor = check_form(what, actual, tuple(reference.shape), dtype)
    advice = f" {advice}" if advice else ""
    unwanted = tensor.isnan() & ~reference.isnan()
    if bool(unwanted.any()):
        raise AssertionError(f"{what} has NaN at {_first(unwanted)} and {int(unwanted.sum())} places in all.{advice}")
    _reject_degenerate(what, tensor, reference, inputs, advice)
    bound = error_bound(reference, plain, scale, dtype)
    deviation = (tensor.double() - reference).abs()
    if tensor.numel() and not float(deviation.max()) <= bound:
        worst = torch.unravel_index(deviation.argmax(), deviation.shape)
        raise AssertionError(
            f"{what} is off by {float(deviation.max()):.3g} at {[int(i) for i in worst]} "
            f"(got {float(tensor[worst]):.6g}, right is {float(reference[worst]):.6g}); "
            f"{dtype} allows {bound:.3g}.{advice}"
        )


def check_equal(what: str, actual: object, expected: Tensor, advice: str = "") -> None:
    """Fail unless a tensor equals another in shape, dtype and every value.

    Raises:
        AssertionError: at the first difference, naming it.
    """
    tensor = check_form(what, actual, tuple(expected.shape), expected.dtype)
    different = tensor != expected
    if bool(different.any()):
        index = _first(different)
        got, wanted = tensor[tuple(index)].item(), expected[tuple(index)].item()
        raise AssertionError(f"{what} differs at {index}: got {got}, right is {wanted}.{' ' if advice else ''}{advice}")


def check_form(what: str, actual: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The value as a tensor; fails unless it is one, of exactly this shape and dtype.

    Raises:
        AssertionError: naming what was returned and what is wanted.
    """
    if not isinstance(actual, Tensor):
        raise AssertionError(f"{what} must be a tensor, got {type(actual).__name__}")
    if tuple(actual.shape) != shape:
        raise AssertionError(f"{what} must have shape {list(shape)}, got {list(actual.shape)}")
    if actual.dtype != dtype:
        raise AssertionError(f"{what} must have dtype {dtype}, got {actual.dtype}")
    return actual


def _reject_degenerate(
    what: str, tensor: Tensor, reference: Tensor, inputs: Sequence[Tensor], advice: str
) -> None:
    """Refuse answers that a loose bound might let through although nothing was computed."""
    if tensor.numel() < 2:
        return
    if not bool(tensor.any()) and bool(reference.any()):
        raise AssertionError(f"{what} is all zeros.{advice}")
    uniform = bool((tensor == tensor.flatten()[0]).all())
    if uniform and not bool((reference == reference.flatten()[0]).all()):
        raise AssertionError(f"{what} has the same value {float(tensor.flatten()[0]):.6g} everywhere.{advice}")
    for given in inputs:
        same_input = given.shape == tensor.shape and torch.equal(given.to(tensor.dtype), tensor)
        if same_input and not torch.equal(given.double(), reference):
            raise AssertionError(f"{what} repeats one of the inputs unchanged.{advice}")


def _first(where: Tensor) -> list[int]:
    """Index of the first True."""
    return [int(i) for i in where.nonzero()[0]]
