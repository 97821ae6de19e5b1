"""Integer quantization in float64, number by number, and checks of a quantized matrix against it.

Codes are judged by what their own scale allows: a number that lies almost between two codes may go either way, since a
scale in float32 is not the one in float64. Scales are judged each by itself, so a small one can't hide behind a large
one, and everything is measured in steps; no measure that forgets the scale, such as a cosine, decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.quantized import QuantizedTensor

SLACK = 16.0
"""Roundings of the arithmetic's dtype that a scale, or a number counted in steps, may be off by."""


@dataclass(frozen=True)
class GroupReference:
    """One group that shares a scale.

    Args:
        places: row and column of its numbers in the matrix.
        scale: in exact arithmetic; 0 for a group of zeros.
        offset: the number of steps from the lowest code to the value 0, not yet rounded; 0 if symmetric.
    """

    places: tuple[tuple[int, int], ...]
    scale: float
    offset: float


def groups_of(rows: int, columns: int, granularity: str, group_size: int | None) -> list[list[list[tuple[int, int]]]]:
    """The places of each group, in the layout of the scales: `[rows or 1, groups]` lists of (row, column)."""
    size = group_size if granularity == "group" and group_size else {"input_channel": 1}.get(granularity, columns)
    shared = granularity in ("tensor", "input_channel")
    blocks = [range(rows)] if shared else [range(row, row + 1) for row in range(rows)]
    spans = [range(start, min(start + size, columns)) for start in range(0, columns, size)]
    return [[[(row, column) for row in block for column in span] for span in spans] for block in blocks]


def reference_groups(
    x: Tensor, bits: int, symmetric: bool, granularity: str, group_size: int | None
) -> list[list[GroupReference]]:
    """Scale and offset of every group, from the numbers in it, in the layout of the scales."""
    values = x.double().tolist()
    result = []
    rows, columns = x.shape
    for block in groups_of(rows, columns, granularity, group_size):
        result.append([_group(places, values, bits, symmetric) for places in block])
    return result


def _group(places: list[tuple[int, int]], values: list[list[float]], bits: int, symmetric: bool) -> GroupReference:
    numbers = [values[row][column] for row, column in places]
    if symmetric:
        return GroupReference(tuple(places), max(map(abs, numbers)) / (2 ** (bits - 1) - 1), 0.0)
    low, high = min(*numbers, 0.0), max(*numbers, 0.0)
    scale = high / (2**bits - 1) - low / (2**bits - 1)
    return GroupReference(tuple(places), scale, -low / scale if scale else 0.0)


def reference_quantize(
    x: Tensor, bits: int, *, symmetric: bool = True, granularity: str = "group", group_size: int | None = None
) -> QuantizedTensor:
    """A quantizer for tasks that build on one, with the arguments of task 1's `quantize`; scales are float32."""
    groups = reference_groups(x, bits, symmetric, granularity, group_size)
    low, high = code_limits(bits, symmetric)
    scale = torch.tensor([[group.scale or 1.0 for group in block] for block in groups], dtype=torch.float32)
    zeros = torch.tensor([[round(group.offset) for group in block] for block in groups], dtype=torch.int16)
    codes = torch.zeros(x.shape, dtype=torch.int8 if high < 128 else torch.int16)
    for row, block in enumerate(groups):
        for index, group in enumerate(block):
            rows, columns = (torch.tensor(axis) for axis in zip(*group.places, strict=True))
            steps = (x[rows, columns].double() / float(scale[row, index])).round() + int(zeros[row, index])
            codes[rows, columns] = steps.clamp(low, high).to(codes.dtype)
    size = group_size if granularity == "group" and group_size else {"input_channel": 1}.get(granularity, x.shape[1])
    return QuantizedTensor(codes, scale, None if symmetric else zeros.to(codes.dtype), bits, size)


def reference_dequantize(q: QuantizedTensor) -> Tensor:
    """scale · (code − zero point) for each number, float64 `[rows, columns]`."""
    columns = torch.arange(q.codes.shape[1]) // q.group_size
    zero_point = 0 if q.zero_point is None else q.zero_point.double()[:, columns]
    return q.scale.double()[:, columns] * (q.codes.double() - zero_point)


def code_limits(bits: int, symmetric: bool) -> tuple[int, int]:
    """The smallest and the largest code."""
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def check_quantized_matrix(
    what: str,
    q: object,
    x: Tensor,
    bits: int,
    *,
    symmetric: bool = True,
    granularity: str = "group",
    group_size: int | None = None,
) -> QuantizedTensor:
    """Fail unless a quantized matrix is what rounding to nearest makes of x; returns it.

    Args:
        what: name of the result, which starts every message.
        q: what the code under test returned.
        x: the matrix `[rows, columns]`, small: groups are checked one by one.
        bits: of a code.
        symmetric: as for task 1's `quantize`, like the other arguments.
        granularity: who shares a scale.
        group_size: for groups.

    Raises:
        AssertionError: another form, a scale or zero point that doesn't follow from its group, or a code that isn't the
            nearest one.
    """
    low, high = code_limits(bits, symmetric)
    groups = reference_groups(x, bits, symmetric, granularity, group_size)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    q = check_quantized_form(what, q, tuple(x.shape), bits, (len(groups), len(groups[0])), dtype, symmetric)
    size = group_size if granularity == "group" and group_size else {"input_channel": 1}.get(granularity, x.shape[1])
    assert q.group_size == size, f"{what}: group_size must be {size}, got {q.group_size!r}"
    slack = SLACK * torch.finfo(dtype).eps
    values, codes = x.double().tolist(), q.codes.tolist()
    scales = q.scale.double().tolist()
    zeros = [[0] * len(groups[0]) for _ in groups] if q.zero_point is None else q.zero_point.tolist()
    for row, block in enumerate(groups):
        for index, group in enumerate(block):
            scale, zero = scales[row][index], zeros[row][index]
            where = f"{what}, group {index} of scale row {row}"
            tiny = group.scale < torch.finfo(dtype).tiny
            assert tiny or abs(scale / group.scale - 1) <= slack, (
                f"{where}: the scale must be {group.scale:.7g}, got {scale:.7g}"
            )
            offset = 0.0 if tiny else group.offset
            assert abs(zero - offset) <= 0.5 + slack * high, (
                f"{where}: the value 0 lies {offset:.4f} steps above the lowest code, the zero point is {zero}"
            )
            for at in group.places:
                steps = values[at[0]][at[1]] / scale + zero
                nearest = min(max(steps, low), high)
                code = codes[at[0]][at[1]]
                assert abs(code - nearest) <= 0.5 + slack * high, (
                    f"{where}: {values[at[0]][at[1]]:.6g} at {list(at)} is {steps:.4f} steps of {scale:.6g}, "
                    f"so its code (from {low} to {high}) is {round(nearest)}, got {code}"
                )
    return q


def check_quantized_form(
    what: str,
    q: object,
    shape: tuple[int, ...],
    bits: int,
    scale_shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    symmetric: bool = True,
) -> QuantizedTensor:
    """Fail unless a result is a `QuantizedTensor` with codes, scales and zero points of the right shapes and ranges.

    Args:
        what: name of the result, which starts every message.
        q: what the code under test returned.
        shape: of the codes.
        bits: of a code.
        scale_shape: of the scales, and of the zero points if there are any.
        dtype: of the scales.
        symmetric: whether there must be no zero points.
    """
    assert isinstance(q, QuantizedTensor), f"{what} must be a QuantizedTensor, got {type(q).__name__}"
    assert q.bits == bits, f"{what}: bits must be {bits}, got {q.bits!r}"
    low, high = code_limits(bits, symmetric)
    _check_integers(f"{what}: codes", q.codes, shape, low, high)
    scale = q.scale
    assert isinstance(scale, Tensor) and tuple(scale.shape) == scale_shape and scale.dtype == dtype, (
        f"{what}: scale must be {dtype} {list(scale_shape)}, got {getattr(scale, 'dtype', type(scale).__name__)} "
        f"{list(getattr(scale, 'shape', ()))}"
    )
    assert bool((scale.isfinite() & (scale > 0)).all()), f"{what}: every scale must be finite and above 0"
    if symmetric:
        assert q.zero_point is None, f"{what}: symmetric codes have no zero point"
    else:
        _check_integers(f"{what}: zero_point", q.zero_point, scale_shape, low, high)
    return q


def _check_integers(what: str, values: object, shape: tuple[int, ...], low: int, high: int) -> None:
    """A tensor of integers within a range, of the smallest signed dtype that holds the range."""
    dtype = torch.int8 if high < 128 else torch.int16
    assert isinstance(values, Tensor) and tuple(values.shape) == shape and values.dtype == dtype, (
        f"{what} must be {dtype} {list(shape)}, got {getattr(values, 'dtype', type(values).__name__)} "
        f"{list(getattr(values, 'shape', ()))}"
    )
    least, most = int(values.min()), int(values.max())
    assert low <= least and most <= high, f"{what} must lie in {low} … {high}, got {least} … {most}"


def awkward_matrix(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that tell quantizers apart: at least 6 rows and 3 columns.

    Row 0 is normal, row 1 all zero, row 2 positive, row 3 negative, row 4 one constant, row 5 has a stretch of zeros in
    its first half; further rows are normal. Column 2 is a huge channel, 300 times the others, and the rows' sizes
    differ by powers of two.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x *= 2.0 ** -(torch.arange(rows, dtype=torch.float64) % 4)[:, None]
    x[:, 2] *= 300
    x[1] = 0
    x[2] = x[2].abs() + 0.1
    x[3] = -x[3].abs() - 0.1
    x[4] = 0.7
    x[5, : columns // 2] = 0
    return x.to(dtype)
