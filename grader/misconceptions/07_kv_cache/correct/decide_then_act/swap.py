"""Block by block, with the bytes counted as they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from labkit.step_plan import StepPlan


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> int:
    """One block at a time, after all have been looked at."""
    if source.dtype is not target.dtype or source[0].shape != target[0].shape:
        raise ValueError(f"{source.dtype} {tuple(source.shape)} doesn't fit {target.dtype} {tuple(target.shape)}")
    written = set()
    for block, copy in pairs:
        if block not in range(len(source)) or copy not in range(len(target)) or copy in written:
            raise ValueError(f"block {block} can't be copied to {copy}")
        written.add(copy)
    count = 0
    for block, copy in pairs:
        target[copy].copy_(source[block])
        count += target[copy].nbytes
    return count


def run_swaps(plan: StepPlan, memory: Any, host: Any) -> int:
    """All copies out of all layers, then all copies in."""
    layers = range(memory.config.num_layers)
    device = [of(layer) for of in (memory.keys, memory.values) for layer in layers]
    backup = [of(layer) for of in (host.keys, host.values) for layer in layers]
    moved = sum(copy_blocks(a, b, plan.swap_out) for a, b in zip(device, backup, strict=True))
    return moved + sum(copy_blocks(b, a, plan.swap_in) for a, b in zip(device, backup, strict=True))
