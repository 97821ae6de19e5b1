"""Checks that all quantizers share: each message names what was given, where, and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from labkit.quantization_checks import (
    check_bits,
    check_finite,
    check_integers,
    check_matrix,
    check_quantized,
    check_scale,
)
from labkit.quantized import QuantizedTensor


@pytest.mark.parametrize("bits", [1, 9, True, 4.0, "4"])
def test_bits_outside_the_formats_are_named(bits: Any) -> None:
    for good in range(2, 9):
        check_bits(good)
    with pytest.raises(ValueError, match=f"bits must be an int from 2 to 8, got {bits!r}"):
        check_bits(bits)


def test_numbers_that_are_not_finite_are_named_with_their_place() -> None:
    x = torch.ones(2, 3)
    check_finite("x", x)
    for value in (math.nan, math.inf, -math.inf):
        x[1, 2] = value
        with pytest.raises(ValueError, match=rf"x must be finite, but holds {value} at \[1, 2\]"):
            check_finite("x", x)
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        check_finite("x", torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 3), (3, 0)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    check_matrix("w", torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"w must be \[rows, columns\] and not empty"):
        check_matrix("w", torch.ones(shape))


def test_scales_must_be_positive() -> None:
    check_scale("scale", torch.tensor([1e-30, 5.0]))
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="scale must be"):
            check_scale("scale", torch.tensor([1.0, value]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_integers_are_compared_as_numbers_whatever_their_dtype(dtype: torch.dtype) -> None:
    check_integers("codes", torch.tensor([0, 7, 3], dtype=dtype), -8, 7)
    check_integers("codes", torch.tensor([], dtype=dtype), 0, 7)
    with pytest.raises(ValueError, match=r"codes must lie in -8 … 7, but holds 100 at \[1\]"):
        check_integers("codes", torch.tensor([0, 100], dtype=dtype), -8, 7)
    if dtype != torch.uint8:
        with pytest.raises(ValueError, match=r"holds -1 at \[0\]"):
            check_integers("codes", torch.tensor([-1, 0], dtype=dtype), 0, 300)
    for bad in (torch.ones(2), torch.ones(2) > 0):
        with pytest.raises(ValueError, match="codes must hold integers"):
            check_integers("codes", bad, 0, 7)


def test_every_granularity_fits_and_other_shapes_do_not() -> None:
    codes = torch.ones(3, 10, dtype=torch.int8)
    for shape, size in (((1, 1), 10), ((3, 1), 10), ((1, 10), 1), ((3, 3), 4), ((3, 1), 128)):
        check_quantized("q", QuantizedTensor(codes, torch.ones(shape), None, 4, size))
        check_quantized("q", QuantizedTensor(codes, torch.ones(shape), torch.ones(shape).char(), 4, size))
    scale = torch.ones(3, 3)
    for bad in (
        QuantizedTensor(codes, torch.ones(3, 2), None, 4, 4),
        QuantizedTensor(codes, torch.ones(2, 3), None, 4, 4),
        QuantizedTensor(codes, -scale, None, 4, 4),
        QuantizedTensor(codes * 8, scale, None, 4, 4),
        QuantizedTensor(-codes, scale, scale.char(), 4, 4),
        QuantizedTensor(codes, scale, scale.char() * 16, 4, 4),
        QuantizedTensor(codes, scale, scale, 4, 4),
        QuantizedTensor(codes[0], scale, None, 4, 4),
        QuantizedTensor(codes, scale, None, 1, 4),
        QuantizedTensor(codes, scale, None, 4, 0),
    ):
        with pytest.raises(ValueError):
            check_quantized("q", bad)
