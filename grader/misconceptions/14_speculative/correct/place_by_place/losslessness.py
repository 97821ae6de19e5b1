"""No rounds, only places: each text knows how many drafts its round has left."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.checks import check_count

from .acceptance import accept_or_resample, check_distributions, check_uniforms, draw


def speculate_many(
    target: Tensor, drafter: Tensor, first: Tensor, num_tokens: int, num_drafts: int, uniforms: Tensor
) -> Tensor:
    """At each place a text judges a draft, or, if its round has none left, draws its own token."""
    if target.dim() != 2 or target.shape != drafter.shape or len(target) != target.shape[-1]:
        raise ValueError(f"two square matrices are needed, got {list(target.shape)} and {list(drafter.shape)}")
    target, drafter = check_distributions("target", target), check_distributions("drafter", drafter)
    check_count("num_tokens", num_tokens, 1)
    check_count("num_drafts", num_drafts, 0)
    if first.dtype != torch.int64 or not bool(((first >= 0) & (first < len(target))).all()):
        raise ValueError("first must hold token ids")
    uniforms = check_uniforms("uniforms", uniforms, torch.Size((len(first), num_tokens, 3)))
    newest, columns = first, []
    left = torch.full_like(first, min(num_drafts, num_tokens - 1))
    for place in range(num_tokens):
        p, q, numbers = target[newest], drafter[newest], uniforms[:, place]
        accepted, judged = accept_or_resample(p, q, draw(q, numbers[:, 0]), numbers[:, 1], numbers[:, 2])
        speculating = left > 0
        newest = torch.where(speculating, judged, draw(p, numbers[:, 2]))
        columns.append(newest)
        fresh = torch.full_like(first, max(0, min(num_drafts, num_tokens - place - 2)))
        left = torch.where(speculating & accepted, left - 1, fresh)
    return torch.stack(columns, 1)


def total_variation(tokens: Tensor, probs: Tensor) -> float:
    """What the tokens have too much of."""
    probs = check_distributions("probs", probs)
    if not tokens.numel() or int(tokens.min()) < 0 or int(tokens.max()) >= len(probs):
        raise ValueError("tokens must be ids of the distribution, at least one")
    shares = torch.nn.functional.one_hot(tokens, len(probs)).double().mean(0)
    return float((shares - probs).clamp(min=0).sum())


def total_variation_limit(probs: Tensor, runs: int, false_alarm: float) -> float:
    """Term by term."""
    rows = check_distributions("probs", probs).tolist()
    check_count("runs", runs, 1)
    if not 0.0 < false_alarm < 1.0:
        raise ValueError(f"a false alarm has a probability between 0 and 1, not {false_alarm!r}")
    mean = math.fsum(math.sqrt(p * (1 - p)) for p in rows) / (2 * math.sqrt(runs))
    return mean + math.sqrt(-math.log(false_alarm) / 2 / runs)
