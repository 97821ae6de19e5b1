"""The window of each token by arithmetic, and losses from probabilities that are shifted by their maximum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Logits = Callable[[list[int]], Tensor]


def windows(num_tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Group the tokens by the first window that reaches them."""
    for name, value, least in (("num_tokens", num_tokens, 2), ("window", window, 2), ("stride", stride, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    if stride >= window:
        raise ValueError(f"a stride of {stride} leaves windows of {window} no overlap")
    firsts: dict[int, int] = {}
    for token in range(1, num_tokens):
        steps = -((window - token - 1) // stride)
        firsts.setdefault(max(0, steps) * stride, token)
    return [(start, min(start + window, num_tokens), first) for start, first in firsts.items()]


def next_token_losses(logits: Logits, tokens: Sequence[int], first: int) -> Tensor:
    """Score with log_softmax of the shifted rows."""
    ids = list(tokens)
    if not ids or first < 1 or first >= len(ids):
        raise ValueError(f"nothing to score from {first} on in {len(ids)} tokens")
    if any(token < 0 for token in ids):
        raise ValueError("token ids must be at least 0")
    rows = logits(ids)
    if rows.shape[0] != len(ids) or rows.ndim != 2:
        raise ValueError(f"logits of {len(ids)} tokens have shape {list(rows.shape)}")
    if not rows.isfinite().all():
        raise ValueError("logits must be finite")
    if max(ids) >= rows.shape[1]:
        raise ValueError(f"id {max(ids)} is outside the vocabulary of {rows.shape[1]}")
    losses = []
    for place in range(first, len(ids)):
        row = rows[place - 1].to(torch.float64)
        row = row - row.max()
        losses.append(row.exp().sum().log() - row[ids[place]])
    return torch.stack(losses)


def token_losses(logits: Logits, tokens: Sequence[int], window: int, stride: int) -> Tensor:
    """Fill in the losses where their tokens stand."""
    ids = list(tokens)
    if any(type(token) is not int for token in ids):
        raise ValueError("token ids must be ints")
    losses = torch.empty(max(len(ids) - 1, 0), dtype=torch.float64)
    for start, end, first in windows(len(ids), window, stride):
        losses[first - 1 : end - 1] = next_token_losses(logits, ids[start:end], first - start)
    return losses


def perplexity(losses: Sequence[Tensor]) -> float:
    """The product of all 1 / p to the power of 1 / tokens."""
    every = check_losses("losses", losses)
    return math.exp(math.fsum(float(part.sum()) for part in every) / sum(len(part) for part in every))


def bits_per_byte(losses: Sequence[Tensor], num_bytes: int) -> float:
    """log2 instead of ln, by byte."""
    every = check_losses("losses", losses)
    if num_bytes < 1:
        raise ValueError(f"num_bytes must be at least 1, got {num_bytes}")
    return math.fsum(float(part.sum()) for part in every) * math.log2(math.e) / num_bytes


def check_losses(name: str, losses: Sequence[Tensor]) -> list[Tensor]:
    """In float64, finite and not empty."""
    every = [torch.as_tensor(part).double() for part in losses]
    if not every or any(part.numel() == 0 for part in every):
        raise ValueError(f"{name} must hold numbers")
    if any(not part.isfinite().all() for part in every):
        raise ValueError(f"{name} must be finite")
    return every
