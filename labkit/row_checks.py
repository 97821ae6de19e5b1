"""Checks of what row kernels and matrix products are given: axes and tile sizes."""

from __future__ import annotations

from torch import Tensor


def check_axes(name: str, tensor: Tensor, *axes: str) -> None:
    """Refuse a tensor with another number of axes.

    Args:
        name: of the argument, for the message.
        tensor: what was given.
        axes: what each axis stands for, e.g. "rows", "columns".

    Raises:
        ValueError: it has more or fewer axes than were named.
    """
    if tensor.dim() != len(axes):
        raise ValueError(f"{name} must be [{', '.join(axes)}], got shape {list(tensor.shape)}")


def check_power_of_two(name: str, size: int, least: int, most: int) -> None:
    """Refuse a tile size that Triton cannot lay out, or that no GPU has room for.

    Args:
        name: of the argument, for the message.
        size: what was given.
        least: the smallest size allowed, itself a power of two.
        most: the largest, likewise.

    Raises:
        ValueError: it is no power of two from `least` to `most`.
    """
    is_count = isinstance(size, int) and not isinstance(size, bool)
    if not is_count or not least <= size <= most or size & (size - 1):
        raise ValueError(f"{name} must be a power of two from {least} to {most}, got {size!r}")
