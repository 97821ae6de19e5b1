"""Task 4b: GPTQ, which rounds column by column and lets the columns to come make good for what rounding did."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_bits, check_matrix
from labkit.quantized import QuantizedTensor

from .hessian import check_damping, check_hessian, inverse_factor
from .uniform import group_params, to_codes

GroupParams = Callable[[Tensor, int, bool], tuple[Tensor, Tensor | None]]
ToCodes = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
Warn = Callable[[str], object]


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
    group_params: GroupParams = group_params,
    to_codes: ToCodes = to_codes,
    warn: Warn = warnings.warn,
) -> QuantizedTensor:
    """Quantize a weight so that the layer's outputs on calibration data change little.

    The columns are rounded one after another. With Uᵀ U the inverse of the damped Hessian (see `inverse_factor`), the
    error e_i = (w_i − ŵ_i) / U_ii of column i takes e_i · U_ij from each column j that is not rounded yet. A group
    gets its scale when the first of its columns is up, from the weights as they are then.

    Columns whose feature never was anything but 0 (H_ii = 0) become 0, and have no say in their group's scale.

    Args:
        weight: `[rows, in]`, floating point.
        hessian: of the layer's inputs, `[in, in]`; see `update_hessian`. Its unit does not matter.
        bits: of a code, 2 to 8.
        group_size: columns that share a scale, at least 1; the last group is shorter if it doesn't divide `in`.
        symmetric: without a zero point.
        damping: share of the mean diagonal that is added to the diagonal, at least 0.
        block_size: columns after which the errors go to all columns behind at once. The answer does not depend on it.
        act_order: round the columns in the order of falling H_ii, so that those that matter most come first, when
            nothing is spoilt yet. Codes, scales and groups stand in the weight's own order even then.
        group_params: task 1's function: scale and zero point of one group of each row.
        to_codes: task 1's function: the codes of numbers, given their scale and zero point.
        warn: is told if the Hessian was of no use, so that the weights were rounded to nearest.

    Returns:
        Codes `[rows, in]` (int8, or int16 for 8 bits with a zero point), and a scale of float64 for a float64 weight,
        else float32. Weights and errors are float64 in between.

    Raises:
        ValueError: a weight or Hessian that isn't finite or doesn't fit, another number of bits, a size below 1, or
            a damping that isn't a finite number of at least 0.

    Source: Frantar et al. 2022 (2210.17323); module section 4.3.
    """
    check_matrix("weight", weight)
    check_hessian(hessian, weight.shape[1])
    check_bits(bits)
    check_count("group_size", group_size, 1)
    check_count("block_size", block_size, 1)
    check_damping(damping)
    # BEGIN SOLUTION
    rows, columns = weight.shape
    dtype = torch.promote_types(weight.dtype, torch.float32)
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(columns, device=weight.device)
    place = order.argsort()
    found = inverse_factor(hessian[order][:, order], damping)
    if found is None:
        warn("GPTQ: no activation, or a Hessian that no damping helps; the weights are rounded to nearest")
        # The factor of features that have nothing to do with each other: no error is passed on.
        factor, work = torch.eye(columns, dtype=torch.float64, device=weight.device), weight[:, order].double()
    else:
        factor, work = found[0], (weight.double() * (diagonal > 0))[:, order]

    groups = place.split(group_size)
    params: dict[int, tuple[Tensor, Tensor | None]] = {}
    code_dtype = torch.int8 if symmetric or bits < 8 else torch.int16
    codes = torch.empty(rows, columns, dtype=code_dtype, device=weight.device)
    errors = torch.zeros_like(work)
    for start in range(0, columns, block_size):
        end = min(start + block_size, columns)
        for i in range(start, end):
            group = int(order[i]) // group_size
            if group not in params:
                members = _pending(work, errors, factor, start, i, groups[group])
                params[group] = group_params(members.to(dtype), bits, symmetric)
            scale, zero_point = params[group]
            column = _pending(work, errors, factor, start, i, order.new_tensor([i]))
            code = to_codes(column.to(dtype), scale, zero_point, bits)
            rounded = scale.double() * (code if zero_point is None else code.int() - zero_point)
            errors[:, i] = ((column - rounded) / factor[i, i])[:, 0]
            codes[:, i] = code[:, 0]
        work[:, end:] -= errors[:, start:end] @ factor[start:end, end:]

    in_order = [params[group] for group in range(len(groups))]
    zeros = [zero for _, zero in in_order if zero is not None]
    return QuantizedTensor(
        codes[:, place].contiguous(),
        torch.cat([scale for scale, _ in in_order], 1),
        torch.cat(zeros, 1) if zeros else None,
        bits,
        group_size,
    )
    # END SOLUTION


# BEGIN SOLUTION
def _pending(work: Tensor, errors: Tensor, factor: Tensor, start: int, i: int, places: Tensor) -> Tensor:
    """Columns as they are before step i: `work` holds the errors of earlier blocks, those of this one come on top."""
    return work[:, places] - errors[:, start:i] @ factor[start:i, places]


# END SOLUTION
