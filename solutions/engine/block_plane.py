"""One kind of number of every block, in the pool and in host memory: a tensor for each layer, or each part of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kv_manager import MoveKind


class BlockPlane:
    """Blocks of numbers, allocated once.

    A block is moved in all `tensors` at once. Whoever computes takes one of them, and no part of the whole: inside of
    a compiled step a write to a part is a change of the whole, which torch would then copy in every layer.

    Args:
        count: tensors, each `[num_blocks, *shape]`.
        num_blocks: blocks in each of them.
        num_host_blocks: blocks in host memory.
        shape: of a block.
        dtype: of the numbers.
        device: where the blocks of the pool lie.
    """

    def __init__(
        self, count: int, num_blocks: int, num_host_blocks: int, shape: Sequence[int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._pool = torch.zeros((count, num_blocks, *shape), dtype=dtype, device=device)
        # A GPU copies from and to pinned memory by itself.
        pinned = device.type == "cuda"
        self._host = torch.zeros((count, num_host_blocks, *shape), dtype=dtype, device="cpu", pin_memory=pinned)
        self.tensors = self._pool.unbind()

    @property
    def num_bytes(self) -> int:
        """Memory of the pool's blocks."""
        return self._pool.numel() * self._pool.element_size()

    @property
    def num_bytes_per_block(self) -> int:
        """Memory of one of them in all tensors."""
        return self.num_bytes // self._pool.shape[1]

    def move(self, kind: MoveKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Makes moves of one kind.

        Args:
            kind: where blocks go.
            sources: their ids.
            targets: as many. Of copies one may be the source of a later one.
        """
        if kind is MoveKind.COPY:
            for source, target in zip(sources, targets, strict=True):
                self._pool[:, target] = self._pool[:, source]
            return
        origin, goal = (self._pool, self._host) if kind is MoveKind.OUT else (self._host, self._pool)
        moved = origin[:, torch.tensor(sources, device=origin.device)].to(goal.device)
        goal[:, torch.tensor(targets, device=goal.device)] = moved

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies single tokens, for blocks whose shape begins with those; all are read before one is written."""
        slots = self._pool.flatten(1, 2)
        slots[:, torch.tensor(targets, device=slots.device)] = slots[:, torch.tensor(sources, device=slots.device)]
