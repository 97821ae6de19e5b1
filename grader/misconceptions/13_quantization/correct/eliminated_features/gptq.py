"""Optimal brain quantization in its first form: after each column the whole inverse is reduced by one feature."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.quantized import QuantizedTensor

from .hessian import inverse_factor
from .uniform import group_params, to_codes


def gptq(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    damping: float = 0.01,
    block_size: int = 128,
    act_order: bool = False,
    group_params: Callable[..., Any] = group_params,
    to_codes: Callable[..., Any] = to_codes,
    warn: Callable[[str], object] = warnings.warn,
) -> QuantizedTensor:
    """No blocks, no factor: all weights move after every rounding, and stay in the order they have."""
    if weight.dim() != 2 or not bool(weight.isfinite().all()):
        raise ValueError(f"weight must be a finite matrix, got {list(weight.shape)}")
    if tuple(hessian.shape) != (weight.shape[1],) * 2 or not bool(hessian.isfinite().all()):
        raise ValueError(f"hessian must be finite and [{weight.shape[1]}] * 2, got {list(hessian.shape)}")
    for name, value, most in (("bits", bits, 8), ("group_size", group_size, None), ("block_size", block_size, None)):
        least = 2 if name == "bits" else 1
        if type(value) is not int or value < least or (most is not None and value > most):
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping must be finite and at least 0, got {damping!r}")
    columns = weight.shape[1]
    present = weight.to(torch.float64, copy=True)
    found = inverse_factor(hessian, damping)
    if found is None:
        warn("no usable Hessian: rounding to nearest")
        inverse = torch.eye(columns, dtype=torch.float64)
    else:
        inverse = found[0].T @ found[0]
        dead = hessian.diagonal() == 0
        present[:, dead] = 0
        # What rounding has left there would move weights that are 0.
        inverse[dead] = inverse[dead] * torch.eye(columns)[dead]
        inverse[:, dead] = inverse[:, dead] * torch.eye(columns)[:, dead]
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    waiting = sorted(range(columns), key=lambda j: -float(hessian[j, j]) if act_order else j)
    codes: list[Tensor] = [torch.empty(0)] * columns
    params: list[Any] = [None] * math.ceil(columns / group_size)
    for column in waiting:
        group = column // group_size
        if params[group] is None:
            params[group] = group_params(
                present[:, group * group_size : (group + 1) * group_size].to(dtype), bits, symmetric
            )
        scale, zero_point = params[group]
        value = present[:, column].clone()
        code = to_codes(value[:, None].to(dtype), scale, zero_point, bits)
        codes[column] = code[:, 0]
        steps = code.double() - (0 if zero_point is None else zero_point.double())
        error = value - (scale.double() * steps)[:, 0]
        own = inverse[column].clone()
        # Rounded columns have only zeros left in the inverse, so they stay where they are.
        present -= torch.outer(error, own / own[column])
        present[:, column] = value
        inverse -= torch.outer(own, own / own[column])
        inverse[column], inverse[:, column] = 0, 0
    zeros = [zero for _, zero in params if zero is not None]
    return QuantizedTensor(
        torch.stack(codes, 1),
        torch.hstack([scale for scale, _ in params]),
        torch.hstack(zeros) if zeros else None,
        bits,
        group_size,
    )
