"""Checks of what quantizers are given: matrices, numbers of bits, and codes with their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.quantized import QuantizedTensor

MIN_BITS, MAX_BITS = 2, 8
"""Bits that the code of an integer format may have."""


def check_bits(bits: int) -> None:
    """Refuse a number of bits that integer codes can't have.

    Raises:
        ValueError: it is no int from 2 to 8.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits must be an int from {MIN_BITS} to {MAX_BITS}, got {bits!r}")


def check_finite(name: str, values: Tensor) -> None:
    """Refuse numbers that no scale can hold.

    Args:
        name: of the argument, for the message.
        values: of any shape.

    Raises:
        ValueError: it is not floating point, or holds NaN or infinity; the message names the first place.
    """
    if not values.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {values.dtype}")
    finite = values.isfinite()
    if not bool(finite.all()):
        place = tuple((~finite).nonzero()[0].tolist())
        raise ValueError(f"{name} must be finite, but holds {float(values[place])} at {list(place)}")


def check_matrix(name: str, values: Tensor) -> None:
    """Refuse anything but a matrix of finite numbers.

    Args:
        name: of the argument, for the message.
        values: `[rows, columns]`, floating point.

    Raises:
        ValueError: other axes, an empty axis, another kind of number, NaN or infinity.
    """
    if values.dim() != 2 or values.numel() == 0:
        raise ValueError(f"{name} must be [rows, columns] and not empty, got shape {list(values.shape)}")
    check_finite(name, values)


def check_scale(name: str, scale: Tensor) -> None:
    """Refuse scales that are not positive: they would turn every value into NaN, infinity or 0.

    Raises:
        ValueError: a number that isn't floating point, finite and above 0.
    """
    check_finite(name, scale)
    if not bool((scale > 0).all()):
        place = (~(scale > 0)).nonzero()[0].tolist()
        raise ValueError(f"{name} must be above 0, but holds {float(scale[tuple(place)])} at {place}")


def check_integers(name: str, values: Tensor, low: int, high: int) -> None:
    """Refuse codes or zero points outside of their range.

    Args:
        name: of the argument, for the message.
        values: of any shape.
        low: the smallest allowed.
        high: the largest allowed.

    Raises:
        ValueError: it holds no integers, or one out of range; the message names the first place.
    """
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got {values.dtype}")
    # Compared as Python's ints: torch casts the bound to the tensor's dtype, where −8 becomes 248.
    if values.numel() and not low <= int(values.min()) <= int(values.max()) <= high:
        wide = values.to(torch.int64)
        place = ((wide < low) | (wide > high)).nonzero()[0].tolist()
        raise ValueError(f"{name} must lie in {low} … {high}, but holds {int(values[tuple(place)])} at {place}")


def check_quantized(name: str, q: QuantizedTensor) -> None:
    """Refuse codes, scales and zero points that don't fit each other.

    Args:
        name: of the argument, for the message.
        q: a quantized matrix.

    Raises:
        ValueError: bits or a group size that can't be, shapes that don't belong together, a scale that isn't positive,
            or an integer that its bits don't hold.
    """
    check_bits(q.bits)
    check_count(f"{name}.group_size", q.group_size, 1)
    if q.codes.dim() != 2 or q.codes.numel() == 0:
        raise ValueError(f"{name}.codes must be [rows, columns] and not empty, got shape {list(q.codes.shape)}")
    rows, columns = q.codes.shape
    groups = -(-columns // q.group_size)
    if tuple(q.scale.shape) not in ((rows, groups), (1, groups)):
        raise ValueError(
            f"{name}.scale must be [{rows}, {groups}] or [1, {groups}] for codes {[rows, columns]} in groups of "
            f"{q.group_size}, got {list(q.scale.shape)}"
        )
    check_scale(f"{name}.scale", q.scale)
    if q.zero_point is None:
        check_integers(f"{name}.codes", q.codes, -(2 ** (q.bits - 1)), 2 ** (q.bits - 1) - 1)
        return
    if q.zero_point.shape != q.scale.shape:
        raise ValueError(
            f"{name}.zero_point must have the shape {list(q.scale.shape)} of the scale, got {list(q.zero_point.shape)}"
        )
    check_integers(f"{name}.codes", q.codes, 0, 2**q.bits - 1)
    check_integers(f"{name}.zero_point", q.zero_point, 0, 2**q.bits - 1)
