"""Task 9c: the pass that a step plan calls for: prompts, pieces of prompts and single tokens, all in one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from labkit.decoder import Decoder
from labkit.step_plan import Chunk

from .batching import ragged_step
from .paged import PagedMemory


def paged_step(decoder: Decoder, memory: PagedMemory, chunks: Sequence[Chunk]) -> list[Tensor]:
    """Run the decoder once on all chunks of a step.

    The scheduler has chosen the blocks; here nothing is taken or freed. Keys and values of a chunk's tokens go into
    their slots, and its queries attend to everything that the request has computed so far.

    Args:
        decoder: the given decoder; called once.
        memory: where keys and values lie.
        chunks: of different requests, at least one.

    Returns:
        For each chunk its logits `[tokens, vocab_size]`.

    Raises:
        ValueError: no chunk, one without tokens, one whose tokens don't fill exactly its blocks, or an id outside
            the vocabulary. Nothing has run then.
    """
    for chunk in chunks:
        total = chunk.start + len(chunk.tokens)
        if not chunk.tokens or len(chunk.blocks) != -(-total // memory.block_size):
            raise ValueError(
                f"request {chunk.request_id}: {len(chunk.tokens)} tokens from position {chunk.start} on don't need "
                f"the {len(chunk.blocks)} blocks {list(chunk.blocks)} of {memory.block_size}"
            )
    # BEGIN SOLUTION
    stores = [_PlannedStore(memory, chunk) for chunk in chunks]
    return ragged_step(decoder, stores, [chunk.tokens for chunk in chunks])
    # END SOLUTION


# BEGIN SOLUTION
class _PlannedStore:
    """A KV store for one pass, over blocks that somebody else has chosen."""

    def __init__(self, memory: PagedMemory, chunk: Chunk) -> None:
        size = memory.block_size
        self.length = chunk.start
        self.capacity = size * len(chunk.blocks)
        self._memory = memory
        self._slots = [chunk.blocks[i // size] * size + i % size for i in range(chunk.start + len(chunk.tokens))]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the chunk's keys and values; returns those of all tokens of the request."""
        self._memory.write(layer, self._slots[self.length :], k, v)
        return self._memory.gather(layer, self._slots)

    def truncate(self, length: int) -> None:
        """Nothing to undo: what a broken pass has written lies behind what the scheduler counts as computed."""


# END SOLUTION
