"""The accesses of a kernel in their order, and as a map of who touched what: for notebooks, in process only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from labkit.instruments.recorder import Access, Recorder

NOBODY = -1
"""In a map: an element that was never touched."""


def trace(call: Callable[[], Any]) -> list[Access]:
    """Every access that the kernels of a call make.

    Args:
        call: runs lab code, e.g. `lambda: fused_softmax(x)`; its kernels must be interpreted.
    """
    accesses: list[Access] = []
    with Recorder(strict=False, on_access=accesses.append):
        call()
    return accesses


def times_touched(accesses: Iterable[Access], tensor: str, operation: str, shape: tuple[int, ...]) -> np.ndarray:
    """How often each element was loaded or stored.

    Args:
        accesses: of a trace.
        tensor: the kernel's parameter; it must be contiguous.
        operation: "load", "store" or "atomic".
        shape: of the tensor.

    Returns:
        Whole numbers of that shape. Lanes that share an address count once an access.
    """
    counts = np.zeros(int(np.prod(shape)), dtype=np.int64)
    for access in _of(accesses, tensor, operation):
        counts[np.unique(access.offsets)] += 1
    return counts.reshape(shape)


def program_that_touched(accesses: Iterable[Access], tensor: str, operation: str, shape: tuple[int, ...]) -> np.ndarray:
    """Which program touched each element last, by its place in the order of programs.

    Args:
        accesses: of a trace.
        tensor: the kernel's parameter; it must be contiguous.
        operation: "load", "store" or "atomic".
        shape: of the tensor.

    Returns:
        Whole numbers of that shape, from 0 in the order in which programs came to the tensor; `NOBODY` where none did.
    """
    programs: dict[tuple[int, int, int], int] = {}
    owners = np.full(int(np.prod(shape)), NOBODY, dtype=np.int64)
    for access in _of(accesses, tensor, operation):
        owners[access.offsets] = programs.setdefault(access.program_id, len(programs))
    return owners.reshape(shape)


def _of(accesses: Iterable[Access], tensor: str, operation: str) -> Iterable[Access]:
    return (one for one in accesses if (one.tensor, one.operation) == (tensor, operation))
