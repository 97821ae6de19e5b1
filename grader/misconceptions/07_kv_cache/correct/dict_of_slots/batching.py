"""Offsets instead of splits, and results written where they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from labkit.decoder import Decoder
from labkit.protocols import KVStore

from .attention import cached_attention


def ragged_positions(lengths: Sequence[int], new_tokens: Sequence[int]) -> Tensor:
    """One by one."""
    if not lengths or len(lengths) != len(new_tokens) or min(new_tokens) < 1 or min(lengths) < 0:
        raise ValueError(f"{list(lengths)} held and {list(new_tokens)} new don't make a batch")
    positions = []
    for held, new in zip(lengths, new_tokens, strict=True):
        for step in range(new):
            positions.append(held + step)
    return torch.tensor(positions)


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_queries: Sequence[int],
    num_keys: Sequence[int],
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] = cached_attention,
) -> Tensor:
    """Goes from sequence to sequence by cumulative offsets."""
    ends_q, ends_k = list(accumulate(num_queries)), list(accumulate(num_keys))
    if len(ends_q) != len(ends_k) or ends_q[-1:] != [q.shape[2]] or ends_k[-1:] != [k.shape[2]]:
        raise ValueError(f"counts {list(num_queries)} and {list(num_keys)} don't fit the tensors")
    result = torch.empty_like(q)
    for index in reversed(range(len(ends_q))):
        rows = slice(ends_q[index] - num_queries[index], ends_q[index])
        keys = slice(ends_k[index] - num_keys[index], ends_k[index])
        result[:, :, rows] = attention(q[:, :, rows], k[:, :, keys], v[:, :, keys])
    return result


def ragged_step(
    decoder: Decoder,
    stores: Sequence[KVStore],
    tokens: Sequence[Sequence[int]],
    attention: Callable[..., Tensor] = ragged_attention,
) -> list[Tensor]:
    """Undoes whatever it did unless it gets to the end."""
    if not stores or len(tokens) != len(stores) or len(set(map(id, stores))) != len(stores):
        raise ValueError("each sequence has tokens and a store")
    flat = [token for row in tokens for token in row]
    if not all(len(row) for row in tokens) or min(flat) < 0 or max(flat) >= decoder.config.vocab_size:
        raise ValueError("each sequence needs tokens of the vocabulary")
    held = [store.length for store in stores]
    new = [len(row) for row in tokens]
    if any(store.length + len(row) > store.capacity for store, row in zip(stores, tokens, strict=True)):
        raise ValueError("a store has too little room")

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        parts: list[Any] = []
        start = 0
        for store, count in zip(stores, new, strict=True):
            parts.append(store.append(layer, k[:, :, start : start + count], v[:, :, start : start + count]))
            start += count
        keys, values = torch.cat([p[0] for p in parts], 2), torch.cat([p[1] for p in parts], 2)
        return attention(q, keys, values, new, [p[0].shape[2] for p in parts])

    logits = None
    try:
        with torch.inference_mode():
            logits = decoder(torch.tensor(flat)[None], ragged_positions(held, new)[None], attend).squeeze(0)
    finally:
        if logits is None:
            for store, length in zip(stores, held, strict=True):
                store.truncate(length)
    ends = list(accumulate(new))
    return [logits[end - count : end].clone() for end, count in zip(ends, new, strict=True)]
