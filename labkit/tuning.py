"""Tile sizes that a GPU chooses by trying them: `triton.autotune` over a short list, made when first needed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


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
    """A kernel that times the choices at its first launch for each value of `key`, and keeps the fastest.

    Only for a GPU: interpreted, it would time Python.

    Args:
        kernel: a `@triton.jit` function.
        configs: the choices; each must fit the smallest card that is to run them.
        key: names of arguments whose values call for a new choice.
    """
    import triton

    choices = [triton.Config(dict(c.meta), num_warps=c.num_warps, num_stages=c.num_stages) for c in configs]
    return triton.autotune(configs=choices, key=list(key))(kernel)
