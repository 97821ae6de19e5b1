"""Task 9b: whole blocks between the memory that the model computes in and host memory, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labkit.step_plan import StepPlan

from .paged import PagedMemory


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> int:
    """Copy blocks from one memory to another.

    Args:
        source: `[num_blocks, block_size, kv_heads, head_dim]`.
        target: another memory of the same dtype, whose blocks have the same shape; there may be more or fewer.
        pairs: (block of the source, block of the target); no target twice.

    Returns:
        Bytes that were copied.

    Raises:
        ValueError: the memories don't fit together, a block doesn't exist, or a target is named twice. Nothing is
            copied then.
    """
    if source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"blocks of {source.dtype} {list(source.shape[1:])} can't be copied to blocks of {target.dtype} "
            f"{list(target.shape[1:])}"
        )
    for pair in pairs:
        for name, block, memory in zip(("source", "target"), pair, (source, target), strict=True):
            if isinstance(block, bool) or not isinstance(block, int) or not 0 <= block < len(memory):
                raise ValueError(f"pair {pair}: the {name} block must be an int from 0 to {len(memory) - 1}")
    targets = [block for _, block in pairs]
    if len(set(targets)) < len(targets):
        raise ValueError(f"a block is named twice among the targets {targets}; one copy would overwrite the other")
    # BEGIN SOLUTION
    target[targets] = source[[block for block, _ in pairs]]
    return len(pairs) * source[0].numel() * source.element_size()
    # END SOLUTION


def run_swaps(plan: StepPlan, memory: PagedMemory, host: PagedMemory) -> int:
    """Make the copies that a step calls for, before anything is computed in it.

    Args:
        plan: of the step.
        memory: keys and values that the model computes with.
        host: the same in host memory: equal shape but for the number of blocks.

    Returns:
        Bytes that were copied, out and in. They cross the bus between the two memories: what a swap costs in place
        of the computation that it saves.

    Raises:
        ValueError: as `copy_blocks`, by the first copy that can't be made.
    """
    # BEGIN SOLUTION
    num_bytes = 0
    # Out before in: what comes in may take the place of what has just gone out.
    for source, target, pairs in ((memory, host, plan.swap_out), (host, memory, plan.swap_in)):
        for layer in range(memory.config.num_layers):
            num_bytes += copy_blocks(source.keys(layer), target.keys(layer), pairs)
            num_bytes += copy_blocks(source.values(layer), target.values(layer), pairs)
    return num_bytes
    # END SOLUTION
