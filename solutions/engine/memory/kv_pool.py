"""The memory behind the block ids: what every layer keeps of its tokens, and the moves between pool and host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..kv_manager import Move, SlotMove
from ..models.kv_shape import KVShape
from .block_plane import BlockPlane
from .kv_formats import KVFormat, PlainKV


class KVPool:
    """What layers keep of their tokens, in blocks, allocated once.

    Args:
        kv_shape: of the model.
        num_blocks: blocks in each layer.
        block_size: tokens in a block.
        num_host_blocks: blocks in host memory, for requests that are swapped out.
        dtype: type of the stored numbers.
        kv_format: how they are stored if not in that type.
        device: where the blocks lie.
        scratch: adds a block that has no id, for rows that only fill a batch up to write to.
    """

    def __init__(
        self, kv_shape: KVShape, num_blocks: int, block_size: int, num_host_blocks: int = 0,
        dtype: torch.dtype = torch.float32, kv_format: KVFormat | None = None, device: torch.device | str = "cpu",
        scratch: bool = False,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.scratch_slot = num_blocks * block_size if scratch else None
        self._format = kv_format or PlainKV(dtype, dtype)
        # Tokens before heads: a token is written in one piece, a block is one range. What a format stores of a number,
        # such as its code and its scale, lies in planes of one arrangement.
        self._planes = [
            BlockPlane(
                kv_shape.num_layers * kv_shape.num_parts, num_blocks + scratch, num_host_blocks,
                (block_size, kv_shape.num_heads, width), kind, self.device,
            )
            for width, kind in self._format.widths(kv_shape.head_dim)
        ]  # fmt: skip
        # For each layer, for each of its parts: memory in every plane, `[blocks, block_size, heads, width]`.
        parts = list(zip(*(plane.tensors for plane in self._planes), strict=True))
        self._layers = [parts[at : at + kv_shape.num_parts] for at in range(0, len(parts), kv_shape.num_parts)]

    @property
    def num_bytes(self) -> int:
        """Memory of the pool, host memory not counted."""
        return sum(plane.num_bytes for plane in self._planes)

    @property
    def num_bytes_per_token(self) -> int:
        """Memory of one token in all layers."""
        return sum(plane.num_bytes_per_block for plane in self._planes) // self.block_size

    def write(self, layer: int, slots: Tensor, *parts: Tensor) -> None:
        """Stores new tokens.

        Args:
            layer: 0 for the first.
            slots: int64 `[tokens]`.
            parts: as many as `KVShape.num_parts`, each `[tokens, heads, head_dim]`; keys come before values.
        """
        for memories, part in zip(self._layers[layer], parts, strict=True):
            for memory, stored in zip(memories, self._format.encode(part), strict=True):
                memory.flatten(0, 1).index_copy_(0, slots, stored)

    def read(self, layer: int, blocks: Tensor | slice) -> tuple[Tensor, ...]:
        """What whole blocks hold.

        Args:
            layer: 0 for the first.
            blocks: ids, int64 `[..., blocks]`; or a range of them, which plain floats are read from where they lie.

        Returns:
            For each part `[..., blocks * block_size, heads, head_dim]`; not to be written to.
        """
        return tuple(
            self._format.decode(*(_take(memory, blocks).flatten(-4, -3) for memory in memories))
            for memories in self._layers[layer]
        )

    def parts(self, layer: int) -> tuple[Tensor, ...] | None:
        """A layer's parts as they lie, for kernels that follow block tables themselves.

        Returns:
            For each part `[blocks, block_size, heads, head_dim]`; None if what is stored has to be decoded first.
        """
        is_plain = isinstance(self._format, PlainKV) and self._format.stored == self._format.computed
        return tuple(memory for (memory,) in self._layers[layer]) if is_plain else None

    def move(self, moves: Sequence[Move], open_blocks: Collection[int] = ()) -> None:
        """Makes the moves of a step, in order; all blocks are alike here, open or full."""
        for kind, group in groupby(moves, key=lambda move: move.kind):
            pairs = list(group)
            for plane in self._planes:
                plane.move(kind, [move.source for move in pairs], [move.target for move in pairs])

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Copies single tokens; all are read before one is written."""
        for plane in self._planes:
            plane.move_slots([move.source for move in moves], [move.target for move in moves])


def _take(memory: Tensor, blocks: Tensor | slice) -> Tensor:
    """Blocks of a part, `[..., blocks, block_size, heads, width]`; `index_select` is the fastest way to gather them."""
    if isinstance(blocks, slice):
        return memory[blocks]
    return memory.index_select(0, blocks.flatten()).unflatten(0, blocks.shape)
