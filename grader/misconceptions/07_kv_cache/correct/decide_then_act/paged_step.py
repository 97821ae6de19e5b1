"""One attend function over all chunks; every sequence's attention by itself, with the memory read as it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.step_plan import Chunk

from .attention import cached_attention


def paged_step(decoder: Any, memory: Any, chunks: Sequence[Chunk]) -> list[Tensor]:
    """Packs the tokens, and cuts q, k and v at the chunks' borders."""
    size, spans, begin = memory.block_size, [], 0
    for chunk in chunks:
        end = chunk.start + len(chunk.tokens)
        if not chunk.tokens or not 0 <= len(chunk.blocks) * size - end < size:
            raise ValueError(f"request {chunk.request_id}: tokens up to {end} and {len(chunk.blocks)} blocks of {size}")
        if not all(0 <= token < decoder.config.vocab_size for token in chunk.tokens):
            raise ValueError(f"request {chunk.request_id}: {chunk.tokens} holds what is no token")
        slots = [block * size + offset for block in chunk.blocks for offset in range(size)][:end]
        spans.append((chunk.start, slots, slice(begin, begin + len(chunk.tokens))))
        begin += len(chunk.tokens)
    if not spans:
        raise ValueError("there is no chunk to compute")

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        result = torch.empty_like(q)
        for start, slots, span in spans:
            memory.write(layer, slots[start:], k[:, :, span], v[:, :, span])
            result[:, :, span] = cached_attention(q[:, :, span], *memory.gather(layer, slots))
        return result

    tokens = [token for chunk in chunks for token in chunk.tokens]
    places = [place for start, slots, _ in spans for place in range(start, len(slots))]
    with torch.no_grad():
        logits = decoder(torch.tensor([tokens]), torch.tensor(places), attend)[0]
    return [logits[span] for _, _, span in spans]
