"""Logits to probabilities through transformers' own filters, for labs that build on sampling but do not teach it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labkit.sampling_params import SamplingParams


def token_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that these settings draw from: temperature, top-k, top-p, min-p, in this order.

    Args:
        logits: `[rows, vocab_size]`, any floating dtype.
        params: one request's settings, for all rows.

    Returns:
        float64 `[rows, vocab_size]`; each row sums to 1. With temperature 0 it is 1 at the lowest id of the likeliest.

    Raises:
        ValueError: another shape, or a row that holds NaN or +inf, or nothing finite.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must have shape [rows, vocab_size], got {list(logits.shape)}")
    scores = logits.to(torch.float64)
    bad = scores.isnan().any(1) | (scores == torch.inf).any(1) | (scores == -torch.inf).all(1)
    if bool(bad.any()):
        row = int(bad.int().argmax())
        raise ValueError(f"row {row} of the logits is no distribution: it holds NaN or +inf, or nothing finite")
    if params.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(1), scores.shape[1]).to(torch.float64)
    scores = (scores - scores.amax(1, keepdim=True)) / params.temperature
    for warper in _filters(params, scores.shape[1]):
        scores = warper(None, scores)
    return scores.softmax(1)


def _filters(params: SamplingParams, vocab_size: int) -> list[Any]:
    top_k = params.top_k if params.top_k < vocab_size else 0
    if not (top_k or params.top_p < 1 or params.min_p):
        return []
    # Imported here: transformers takes seconds to load, and plain sampling does without.
    from transformers.generation import logits_process

    filters: list[Any] = []
    if top_k:
        filters.append(logits_process.TopKLogitsWarper(top_k))
    if params.top_p < 1:
        filters.append(logits_process.TopPLogitsWarper(params.top_p))
    if params.min_p:
        filters.append(logits_process.MinPLogitsWarper(min(params.min_p, 1.0)))
    return filters
