"""A block allocator whose answers come from the test, so that the test sees every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.protocols import Spec


@dataclass(frozen=True)
class ScriptedPool(Spec):
    """Stands for a block allocator; see lab 07, task 7, for what each function does.

    Args:
        num_blocks: size of the pool.
        num_free: returns the number of free blocks.
        allocate: takes a count, returns that many block ids.
        share: takes a block id.
        free: takes a block id.
        ref_count: takes a block id, returns the number of its owners.
    """

    num_blocks: int
    num_free: Callable[[], int]
    allocate: Callable[[int], list[int]]
    share: Callable[[int], None]
    free: Callable[[int], None]
    ref_count: Callable[[int], int]

    def build(self) -> Any:
        """An object that calls back."""
        return _Scripted(self)


class _Scripted:
    """Shows a script's functions as the methods and properties of an allocator."""

    def __init__(self, script: ScriptedPool) -> None:
        self.num_blocks = script.num_blocks
        self.share = script.share
        self.free = script.free
        self.ref_count = script.ref_count
        self._script = script

    @property
    def num_free(self) -> int:
        """Free blocks, by the test's count."""
        return self._script.num_free()

    def allocate(self, count: int = 1) -> list[int]:
        """Blocks of the test's choice."""
        return self._script.allocate(count)
