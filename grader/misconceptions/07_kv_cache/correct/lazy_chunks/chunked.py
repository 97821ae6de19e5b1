"""Checks at the first step of a generator; the logits are written into a tensor of the final size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from labkit.protocols import CachedModel


def prefill_chunks(model: CachedModel, prompt: Sequence[int], chunk_size: int) -> Iterator[Tensor]:
    """Takes chunks off the front of what is left."""
    left = list(prompt)
    if type(chunk_size) is not int or chunk_size < 1:
        raise ValueError(f"a chunk has at least one token, not {chunk_size!r}")
    if not left or not all(0 <= token < model.vocab_size for token in left):
        raise ValueError("the prompt needs tokens, all of them inside the vocabulary")
    if len(left) > model.capacity - model.length:
        raise ValueError(f"{len(left)} tokens, but there is room for {model.capacity - model.length}")
    while left:
        chunk, left = left[:chunk_size], left[chunk_size:]
        yield model.append(chunk)


def prefill(model: CachedModel, prompt: Sequence[int], chunk_size: int) -> Tensor:
    """Fills the rows as they come."""
    before, row = model.length, 0
    result = torch.empty(len(prompt), model.vocab_size)
    done = False
    try:
        for logits in prefill_chunks(model, prompt, chunk_size):
            result = result.to(logits.dtype)
            result[row : row + len(logits)] = logits
            row += len(logits)
        done = True
    finally:
        if not done and model.length > before:
            model.truncate(before)
    return result
