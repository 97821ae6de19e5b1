"""What a launcher may ask the card: how many programs run at once, and which of a few tile sizes is fastest."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch


def num_multiprocessors(device: torch.device) -> int:
    """How many programs a device runs at the same time, one on each multiprocessor; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class TileConfig:
    """One choice of tile sizes.

    Args:
        meta: names and values of the kernel's constants.
        num_warps: warps of 32 threads in a program.
        num_stages: tiles in flight between memory and the matrix units; each takes shared memory.
    """

    meta: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, *, num_warps: int, num_stages: int, **meta: int) -> TileConfig:
        """A choice with the constants by name."""
        return cls(tuple(meta.items()), num_warps, num_stages)


@functools.cache
def tuned(kernel: Any, configs: tuple[TileConfig, ...], key: tuple[str, ...]) -> Any:
    """A kernel under `triton.autotune`: it times the choices at the first launch for each `key`, and keeps the fastest.

    Only for a GPU: interpreted, it would time Python.

    Args:
        kernel: a `@triton.jit` function.
        configs: the choices; each must fit the smallest card that is to run them.
        key: names of arguments whose values call for a new choice.
    """
    import triton

    choices = [triton.Config(dict(c.meta), num_warps=c.num_warps, num_stages=c.num_stages) for c in configs]
    return triton.autotune(configs=choices, key=list(key))(kernel)
