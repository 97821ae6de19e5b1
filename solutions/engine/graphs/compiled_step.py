"""Decode steps through torch.compile: fewer and larger kernels, one program for many sizes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._dynamo.types import GuardFilterEntry

from ..attention.decode_inputs import DecodeInputs, DecodeStep


def compiled(step: DecodeStep, backend: str = "inductor") -> DecodeStep:
    """A step that is compiled when it first runs: as a whole, or not at all.

    Its number of rows and the width of its tables are left open; torch makes programs of their own for a size of 1.

    Args:
        step: computes one.
        backend: of `torch.compile`.
    """
    # Its programs are for this step alone, and of what it reads only the inputs ever change.
    options = {"guard_filter_fn": _are_of_inputs}
    whole: DecodeStep = torch.compile(  # type: ignore[call-overload]  # its overloads have forgotten `isolate_recompiles`
        step, backend=backend, fullgraph=True, isolate_recompiles=True, options=options
    )

    def run(inputs: DecodeInputs) -> Tensor:
        for tensor in (inputs.tokens, inputs.positions, inputs.slots, inputs.lengths, inputs.every_row, inputs.tables):
            for axis in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
        return whole(inputs)

    return run


def _are_of_inputs(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Which of the conditions of a program are asked before each step; those on model and pool would take as long as
    several layers do."""
    return [not any(part in guard.name for part in ("self.", "G[")) for guard in guards]


def compiler_fault(device: torch.device) -> str | None:
    """Why torch can't compile for a device; None if it can. For a CPU it goes by way of C++."""
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if device.type != "cpu" or any(shutil.which(one) for one in compilers):
        return None
    return f"for a CPU torch needs a C++ compiler, and there is no {' or '.join(compilers)}; install one"
