"""One run after another, one place after another, with an early end."""

from __future__ import annotations

import torch
from torch import Tensor

from .acceptance import accept_or_resample, check_uniforms, draw

NOTHING = -1


def verify(
    p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor, num_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All runs judge their place 0, those that are left their place 1, and so on."""
    if q.dim() != 3 or p.shape != (q.shape[0], q.shape[1] + 1, q.shape[2]):
        raise ValueError(f"p needs one row more than q, got {list(p.shape)} and {list(q.shape)}")
    runs, k, _ = q.shape
    counts = torch.full((runs,), k) if num_drafts is None else num_drafts
    if counts.shape != (runs,) or not bool(((counts >= 0) & (counts <= k)).all()):
        raise ValueError(f"num_drafts must name 0 to {k} drafts for each of {runs} runs")
    if drafts.shape != (runs, k):
        raise ValueError(f"drafts must have shape {[runs, k]}, got {list(drafts.shape)}")
    check_uniforms("uniforms", uniforms, torch.Size((runs, k + 1, 2)))
    _look_at_all(p, q, drafts, uniforms, counts)
    tokens = torch.full((runs, k + 1), NOTHING)
    kept = torch.zeros(runs, dtype=torch.int64)
    alive = torch.arange(runs)
    for place in range(k + 1):
        done = alive[counts[alive] == place]
        tokens[done, place] = draw(p[done, place], uniforms[done, place, 1])
        alive = alive[counts[alive] > place]
        if not len(alive):
            break
        accepted, out = accept_or_resample(
            p[alive, place], q[alive, place], drafts[alive, place], uniforms[alive, place, 0], uniforms[alive, place, 1]
        )
        tokens[alive, place] = out
        alive = alive[accepted]
        kept[alive] += 1
    return tokens, kept


def _look_at_all(p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor, counts: Tensor) -> None:
    """Refuse what isn't padding and doesn't fit, even where no run comes so far."""
    for place in range(q.shape[1] + 1):
        draw(p[counts >= place, place], uniforms[counts >= place, place, 1])
        if place < q.shape[1]:
            live = counts > place
            accept_or_resample(
                p[live, place], q[live, place], drafts[live, place], uniforms[live, place, 0], uniforms[live, place, 1]
            )
