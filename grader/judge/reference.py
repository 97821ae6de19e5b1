"""Reference mathematics, written another way than the labs' solutions so that both can't share a mistake."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attention64(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention in float64, one query at a time over just the keys it may see, so that no mask exists.

    Args:
        q: `[batch, heads, num_queries, head_dim]`, the last tokens of the sequence.
        k: `[batch, kv_heads, num_keys, head_dim]`
        v: as `k`.
        scale: factor on the scores; None means 1 / sqrt(head_dim).

    Returns:
        float64 `[batch, heads, num_queries, head_dim]`; 0 where a query sees no key.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = (_a_head_each(t.double(), q.shape[1]) for t in (k, v))
    queries = q.double()
    result = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[2]):
        visible = k.shape[2] - q.shape[2] + row + 1
        if visible > 0:
            scores = (keys[:, :, :visible] * queries[:, :, row : row + 1]).sum(-1) * scale
            weights = (scores - scores.max(-1, keepdim=True).values).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            result[:, :, row] = (weights.unsqueeze(-1) * values[:, :, :visible]).sum(2)
    return result


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """The textbook formula in the inputs' own dtype: the measure of how much error that dtype costs.

    Arguments and shapes as for `attention64`; the result has q's dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = _a_head_each(k, q.shape[1]), _a_head_each(v, q.shape[1])
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(hidden, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ values


def _a_head_each(t: Tensor, heads: int) -> Tensor:
    """K or V with its heads repeated so that every query head has its own."""
    return t[:, [head // (heads // t.shape[1]) for head in range(heads)]]


def softmax64(logits: Sequence[float], temperature: float) -> list[float]:
    """softmax(logits / temperature) in Python floats; temperature 0 gives 1 at the first of the largest."""
    top = max(logits)
    if temperature == 0:
        first = list(logits).index(top)
        return [float(i == first) for i in range(len(logits))]
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def filtered(probs: Sequence[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """top-k, then top-p, then min-p on one distribution, each on the renormalised survivors of the last.

    Args:
        probs: one distribution.
        top_k: keep so many, ties to the lower id; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass; 1 keeps all.
        min_p: keep what is at least this share of the largest probability, and always the first of the largest.
    """
    row = list(probs)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if 0 < top_k < len(row):
        row = _only(row, order[:top_k])
    if top_p < 1:
        count, mass = 1, row[order[0]]
        while mass < top_p and count < len(row):
            mass += row[order[count]]
            count += 1
        row = _only(row, order[:count])
    if min_p > 0:
        row = _only(row, [i for i in order if row[i] >= min_p * row[order[0]] or i == order[0]])
    return row


def _only(row: list[float], survivors: Sequence[int]) -> list[float]:
    """The row with everything else at 0, summing to 1."""
    total = math.fsum(row[i] for i in survivors)
    kept = set(survivors)
    return [p / total if i in kept else 0.0 for i, p in enumerate(row)]


def inverse_cdf(probs: Sequence[float], u: float) -> int:
    """The first token whose cumulative probability exceeds u; the last possible one if rounding left none."""
    total, last = 0.0, 0
    for token, p in enumerate(probs):
        if p > 0:
            total, last = total + p, token
            if total > u:
                return token
    return last
