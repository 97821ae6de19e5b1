"""Compiles the engine's kernels in a process of its own, without the interpreter, and prints what came of them.

python -m tests.engine.compile_kernels [CAPABILITY ...]
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch

from labkit.instruments.compiled import Case, compile_case
from labkit.loader import LabPackage
from labkit.manifest import ROOT


def arguments(dtype: torch.dtype, head_dim: int, count: int) -> tuple[Any, ...]:
    """Of a step with a piece of a prompt; nine heads read three."""
    blocks = torch.zeros(8, 16, 3, head_dim, dtype=dtype)
    counts = torch.tensor([count])
    tables = torch.zeros(1, 8, dtype=torch.int64)
    return torch.zeros(count, 9, head_dim, dtype=dtype), blocks, blocks, tables, counts - count, counts, counts, count


def main(capabilities: tuple[int, ...]) -> None:
    """Prints a line for each kernel and card."""
    name = "paged_attention"
    package = LabPackage("engine_kernels", ROOT / "solutions" / "engine" / "kernels", [name])
    package.mount()
    for given in ((torch.bfloat16, 128, 64), (torch.float32, 128, 64), (torch.bfloat16, 64, 1)):
        case = Case(1, name, name, functools.partial(arguments, *given), capabilities)
        for one in compile_case(package, case):
            print(json.dumps({"capability": one.capability, "fits": one.fits, "text": str(one)}))


if __name__ == "__main__":
    main(tuple(int(one) for one in sys.argv[1:]) or (120,))
