"""What Triton's interpreter lets pass and a GPU does not."""

from __future__ import annotations

from typing import Any

import numpy as np

MIN_DOT_K = {8: 32, 16: 16, 32: 16}
"""Least K of `tl.dot` by bits of an operand, on NVIDIA GPUs with triton 3.7; the interpreter takes any."""

_HUGE = 2.0**100


def dot_k_fault(bits: int, k: int) -> str | None:
    """Why a `tl.dot` over K elements does not compile for a GPU.

    Args:
        bits: of an operand's elements.
        k: length of the dimension that is summed over.
    """
    least = MIN_DOT_K.get(bits, 16)
    if k >= least:
        return None
    return (
        f"tl.dot sums over K = {k}, and a GPU needs at least {least} for {bits}-bit operands; "
        f"pad the block to {least} with masked lanes, or use tl.sum of a product"
    )


def overflow_fault(bits: str) -> str:
    """What to say of an integer result that wrapped around."""
    return (
        f"{bits} arithmetic overflowed, so that an offset points elsewhere; "
        "convert one factor with .to(tl.int64) before multiplying"
    )


def bf16_fault(operation: str) -> str:
    """What to say of arithmetic in bf16, which the interpreter does on the bits of the numbers."""
    return f"{operation} on bf16 values is garbage in the interpreter; convert to tl.float32 right after the load"


def missing_other_fault(num_lanes: int) -> str:
    """What to say of masked-off lanes whose value decides the result."""
    return (
        f"{num_lanes} lanes were switched off by the mask of a tl.load without `other`, and the result depends on "
        "them: they hold 0 in the interpreter and anything on a GPU; name `other`"
    )


def poison(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """What undefined lanes hold: values whose use shows, whichever way they are used.

    NaN shows in sums and products, but `tl.max` passes over it; a huge number shows in a maximum. So they alternate.
    """
    lanes = np.empty(int(np.prod(shape)), dtype=dtype)
    if dtype.kind == "f":
        lanes[0::2] = min(_HUGE, float(np.finfo(dtype).max) / 2)
        lanes[1::2] = np.nan
    elif dtype.kind in "iu":
        lanes[:] = np.iinfo(dtype).max // 3
    else:
        lanes[:] = True
    return lanes.reshape(shape)
