"""Task 2: judge a run of drafts with the target's distributions of one single pass."""

from __future__ import annotations

import torch
from torch import Tensor

from .acceptance import accept_or_resample, check_uniforms, draw

NOTHING = -1
"""Stands in the rows of a result behind their last token."""


def verify(
    p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor, num_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Judge k drafts in each of many independent runs, from the front, and add one token of the target's own.

    The first draft that is rejected is replaced by a draw from the residual there, and everything behind it is
    dropped: it was drafted for another text. If all are kept, a bonus token is drawn from the target's distribution
    after the last of them; it costs nothing, since the pass that judged the drafts gave that distribution, too.

    Args:
        p: the target's distributions `[runs, k + 1, vocab_size]`: row i after the first i drafts.
        q: the distributions that the drafts were drawn from `[runs, k, vocab_size]`. k may be 0.
        drafts: int64 `[runs, k]`.
        uniforms: `[runs, k + 1, 2]`, each at least 0 and below 1. `uniforms[:, i, 0]` decides whether draft i is
            kept, `uniforms[:, i, 1]` draws the target's own token if it falls at place i.
        num_drafts: how many drafts each run really has, int64 `[runs]` from 0 to k; what stands behind them is
            padding and may be anything. None means k for all.

    Returns:
        The tokens of each run, int64 `[runs, k + 1]` with -1 behind its last, and how many drafts were kept, int64
        `[runs]`. A run emits one token more than it kept.

    Raises:
        ValueError: shapes that don't fit, a row that is no distribution, a uniform outside [0, 1), a draft that q
            can't have drawn, or a count outside 0 to k. Padding is not looked at.

    Source: Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318); module section 3.
    """
    p, q, drafts, uniforms, num_drafts = _checked(p, q, drafts, uniforms, num_drafts)
    # BEGIN SOLUTION
    runs, k = drafts.shape
    accepted, replaced = accept_or_resample(p[:, :k], q, drafts, uniforms[:, :k, 0], uniforms[:, :k, 1])
    places = torch.arange(k + 1)
    # The product stays 1 until the first rejection, so its sum is the number of drafts before it.
    kept = (accepted & (places[:k] < num_drafts[:, None])).int().cumprod(1).sum(1)
    bonus = draw(p[torch.arange(runs), num_drafts], uniforms[torch.arange(runs), num_drafts, 1])
    own = torch.cat([replaced, bonus[:, None]], 1)[torch.arange(runs), kept]
    own = torch.where(kept == num_drafts, bonus, own)
    tokens = torch.cat([drafts, own[:, None]], 1)
    tokens = torch.where(places == kept[:, None], own[:, None], tokens)
    return tokens.where(places <= kept[:, None], torch.full_like(tokens, NOTHING)), kept
    # END SOLUTION


def _checked(
    p: Tensor, q: Tensor, drafts: Tensor, uniforms: Tensor, num_drafts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments with their padding made harmless, or a ValueError."""
    if p.dim() != 3 or q.dim() != 3 or p.shape[1] != q.shape[1] + 1 or (p.shape[0], p.shape[2]) != (
        q.shape[0], q.shape[2]
    ):  # fmt: skip
        raise ValueError(
            f"p must have shape [runs, k + 1, vocab_size] and q [runs, k, vocab_size], got {list(p.shape)} and "
            f"{list(q.shape)}"
        )
    runs, k, vocab_size = q.shape
    if num_drafts is None:
        num_drafts = torch.full((runs,), k)
    if num_drafts.shape != (runs,) or num_drafts.dtype != torch.int64:
        raise ValueError(f"num_drafts must be int64 [{runs}], got {num_drafts.dtype} {list(num_drafts.shape)}")
    if runs and not 0 <= int(num_drafts.min()) <= int(num_drafts.max()) <= k:
        raise ValueError(f"num_drafts must lie between 0 and the {k} drafts there are, got {num_drafts.tolist()}")
    if drafts.shape != (runs, k) or drafts.dtype != torch.int64:
        raise ValueError(f"drafts must be int64 [{runs}, {k}], got {drafts.dtype} {list(drafts.shape)}")
    uniforms = check_uniforms("uniforms", uniforms, torch.Size((runs, k + 1, 2)))
    # Rows and drafts are looked at where they are judged, by the functions of task 1: over a whole vocabulary a second
    # look costs as much as the rule itself.
    if runs and int(num_drafts.min()) < k:
        even = torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64)
        places = torch.arange(k + 1)
        padding = places[:k] >= num_drafts[:, None]
        drafts = drafts.where(~padding, torch.zeros_like(drafts))
        q = torch.where(padding[:, :, None], even, q.to(torch.float64))
        p = torch.where((places > num_drafts[:, None])[:, :, None], even, p.to(torch.float64))
    return p, q, drafts, uniforms, num_drafts
