"""Checks of axes and tile sizes say what was given and what is allowed."""

from __future__ import annotations

import pytest
import torch

from labkit.row_checks import check_axes, check_power_of_two


def test_axes_are_counted_and_named() -> None:
    check_axes("x", torch.zeros(2, 3), "rows", "columns")
    with pytest.raises(ValueError, match=r"x must be \[rows, columns\], got shape \[2\]"):
        check_axes("x", torch.zeros(2), "rows", "columns")


@pytest.mark.parametrize("size", [16, 32, 64])
def test_powers_of_two_within_limits_pass(size: int) -> None:
    check_power_of_two("block_size", size, 16, 64)


@pytest.mark.parametrize("size", [8, 24, 128, 0, -16, True, 16.0, "16"])
def test_other_sizes_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match="block_size must be a power of two from 16 to 64"):
        check_power_of_two("block_size", size, 16, 64)  # type: ignore[arg-type]
