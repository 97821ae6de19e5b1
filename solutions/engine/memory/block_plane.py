"""One kind of number of every block, in the pool and in host memory: a tensor for each layer, or each part of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kv_manager import MoveKind


class BlockPlane:
    """Blocks of numbers, allocated once.

    Each tensor has memory of its own. Were they views of one, torch.compile would take a write to one of them for a
    change of all, and copy the whole pool in every layer of every step.

    Args:
        count: tensors.
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
        self.tensors = tuple(torch.zeros((num_blocks, *shape), dtype=dtype, device=device) for _ in range(count))
        # A GPU copies from and to pinned memory by itself.
        pinned = device.type == "cuda"
        self._host = tuple(
            torch.zeros((num_host_blocks, *shape), dtype=dtype, device="cpu", pin_memory=pinned) for _ in range(count)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the pool's blocks."""
        return sum(one.numel() * one.element_size() for one in self.tensors)

    @property
    def num_bytes_per_block(self) -> int:
        """Memory of one of them in all tensors."""
        return sum(one[0].numel() * one.element_size() for one in self.tensors)

    def move(self, kind: MoveKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Makes moves of one kind.

        Args:
            kind: where blocks go.
            sources: their ids.
            targets: as many. Of copies one may be the source of a later one.
        """
        if kind is MoveKind.COPY:
            for source, target in zip(sources, targets, strict=True):
                for tensor in self.tensors:
                    tensor[target] = tensor[source]
            return
        origins, goals = (self.tensors, self._host) if kind is MoveKind.OUT else (self._host, self.tensors)
        read = torch.tensor(sources, device=origins[0].device)
        written = torch.tensor(targets, device=goals[0].device)
        for origin, goal in zip(origins, goals, strict=True):
            goal[written] = origin[read].to(goal.device)

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies single tokens, for blocks whose shape begins with those; all are read before one is written."""
        device = self.tensors[0].device
        read, written = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for tensor in self.tensors:
            slots = tensor.flatten(0, 1)
            slots[written] = slots[read]
