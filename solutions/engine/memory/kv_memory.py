"""The memory of keys and values that a name asks for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from ..kv_manager import Move, SlotMove
from ..models.kv_shape import KVShape
from .kv_formats import BY_BLOCK, kv_format
from .kv_pool import KVPool


class KVMemory(Protocol):
    """Where keys and values lie; see `KVPool` and `KiviPool`."""

    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, host memory not counted."""

    @property
    def num_bytes_per_token(self) -> float:
        """Memory of one token in all layers, as part of a long text."""

    def move(self, moves: Sequence[Move], open_blocks: Collection[int]) -> None:
        """Makes the moves of a step, in order; texts end in `open_blocks`."""

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Copies single tokens; all are read before one is written."""


def kv_memory(
    name: str | None, kv_shape: KVShape, num_blocks: int, block_size: int, num_host_blocks: int, dtype: torch.dtype,
    device: torch.device, max_requests: int, max_drafts: int,
) -> KVMemory:  # fmt: skip
    """Makes the memory.

    Args:
        name: how numbers are stored, as `EngineConfig.kv_dtype`.
        kv_shape: of the model.
        num_blocks: of the pool.
        block_size: tokens in a block.
        num_host_blocks: blocks in host memory.
        dtype: to compute in.
        device: where the model lies.
        max_requests: that hold blocks at once.
        max_drafts: of a request in a step.

    Raises:
        ValueError: a name that is not known, or that does not suit the model or its device.
    """
    if name not in BY_BLOCK:
        format = kv_format(name, dtype)
        return KVPool(kv_shape, num_blocks, block_size, num_host_blocks, dtype, format, device, scratch=True)
    if device.type != "cpu":
        raise ValueError(f"kv_dtype {name!r} runs on device 'cpu' only, got {str(device)!r}; take another kv_dtype")
    # Imported here: others need nothing of lab 13.
    from .kivi_codes import KIVI_BITS
    from .kivi_pool import KiviPool

    bits = KIVI_BITS[name]
    return KiviPool(kv_shape, bits, num_blocks, block_size, max_requests, num_host_blocks, dtype, max_drafts)
