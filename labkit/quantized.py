"""What integer quantization makes of a matrix: codes, and the scales and zero points that they share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix in integers: value = scale · (code − zero_point).

    A scale is shared by `group_size` neighbouring columns of one row (the last group of a row may be shorter), or by
    the same columns of all rows where `scale` has one row only. So one form holds every granularity:

    - per tensor: scale `[1, 1]`, one group as long as a row;
    - per channel of a weight, per token of an activation: scale `[rows, 1]`, one group as long as a row;
    - per input channel: scale `[1, columns]`, groups of one column;
    - per group: scale `[rows, ⌈columns / group_size⌉]`.

    Args:
        codes: integers, `[rows, columns]`; signed where `zero_point` is None, from 0 up where it is given.
        scale: positive and finite, `[rows or 1, groups]`.
        zero_point: the code of the value 0, integers of `scale`'s shape; None for symmetric quantization, whose zero
            is the code 0.
        bits: of a code.
        group_size: columns that share a scale, at least 1.

    Source: module section 4.1.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bits: int
    group_size: int
