"""The memory of keys and values that a name asks for, and the attention that reads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from .attention import PagedAttention
from .kv_formats import BY_BLOCK, kv_format
from .kv_manager import Move
from .kv_pool import KVPool, KVShape
from .models.packed_attention import PackedAttention
from .step import Work

MakeAttention = Callable[[Any, tuple[Work, ...]], PackedAttention]
"""Called with a memory of the kind that it knows, and with the work of a step."""


class KVMemory(Protocol):
    """Where keys and values lie; see `KVPool` and `KiviPool`."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, host memory not counted."""

    def move(self, moves: Sequence[Move], open_blocks: Collection[int]) -> None:
        """Makes the moves of a step, in order; texts end in `open_blocks`."""


def kv_memory(
    name: str | None, kv_shape: KVShape, num_blocks: int, block_size: int, num_host_blocks: int, dtype: torch.dtype,
    max_requests: int, max_drafts: int,
) -> tuple[KVMemory, MakeAttention]:  # fmt: skip
    """Makes the memory.

    Args:
        name: how numbers are stored, as `EngineConfig.kv_dtype`.
        kv_shape: of the model.
        num_blocks: of the pool.
        block_size: tokens in a block.
        num_host_blocks: blocks in host memory.
        dtype: to compute in.
        max_requests: that hold blocks at once.
        max_drafts: of a request in a step.

    Raises:
        ValueError: a name that is not known, or that does not suit the model.
    """
    if name not in BY_BLOCK:
        format = kv_format(name, dtype)
        return KVPool(kv_shape, num_blocks, block_size, num_host_blocks, dtype, format), PagedAttention
    # Imported here: others need nothing of lab 13.
    from .kivi_attention import KiviAttention
    from .kivi_codes import KIVI_BITS
    from .kivi_pool import KiviPool

    bits = KIVI_BITS[name]
    pool = KiviPool(kv_shape, bits, num_blocks, block_size, max_requests, num_host_blocks, dtype, max_drafts)
    return pool, KiviAttention
