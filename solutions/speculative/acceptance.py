"""Task 1: keep or replace one drafted token, so that what comes out is distributed as the target would draw it."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-3
"""How far the sum of a distribution may be from 1: half precision rounds each number by up to 2^-11 of itself."""


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """The chance that a token drawn from q is kept, over all tokens that q may draw.

    Args:
        p: the target's distributions `[..., vocab_size]`.
        q: the drafter's, same shape.

    Returns:
        sum over x of min(p(x), q(x)), float64 `[...]`; 1 minus the total-variation distance of p and q.

    Raises:
        ValueError: the shapes differ, or a row is no distribution.

    Source: Leviathan et al. 2023 (2211.17192); module section 3.1.
    """
    p, q = _check_pair(p, q)
    # BEGIN SOLUTION
    return torch.minimum(p, q).sum(-1)
    # END SOLUTION


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What the target still wants where the drafter's token was rejected: norm(max(0, p - q)).

    Args:
        p: the target's distributions `[..., vocab_size]`.
        q: the drafter's, same shape.

    Returns:
        float64 `[..., vocab_size]`, each row a distribution. Where q nowhere falls short of p, nothing is ever
        rejected, and the row is p.

    Raises:
        ValueError: the shapes differ, or a row is no distribution.
    """
    p, q = _check_pair(p, q)
    # BEGIN SOLUTION
    return _residual(p, q)
    # END SOLUTION


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row, by the inverse of the cumulative distribution in the order of ids.

    Args:
        probs: distributions `[..., vocab_size]`.
        uniforms: `[...]`, each at least 0 and below 1.

    Returns:
        int64 `[...]`; never a token of probability 0.

    Raises:
        ValueError: the shapes don't fit, a row is no distribution, or a uniform is outside [0, 1).
    """
    probs = check_distributions("probs", probs)
    uniforms = check_uniforms("uniforms", uniforms, probs.shape[:-1])
    # BEGIN SOLUTION
    return _draw(probs, uniforms)
    # END SOLUTION


def accept_or_resample(
    p: Tensor, q: Tensor, drafts: Tensor, accept_uniforms: Tensor, resample_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Judge one drafted token in each of many independent runs.

    A token x is kept with probability min(1, p(x) / q(x)). Otherwise one drawn from `residual(p, q)` takes its place.

    Args:
        p: the target's distributions `[runs, vocab_size]`.
        q: the distributions that the drafts were drawn from `[runs, vocab_size]`.
        drafts: the drafted tokens, int64 `[runs]`; q is above 0 there.
        accept_uniforms: `[runs]`, each at least 0 and below 1: the draft is kept if the uniform lies below the ratio.
        resample_uniforms: `[runs]`, for `draw`, used where the draft was rejected.

    Returns:
        Whether each draft was kept, bool `[runs]`, and the tokens that come out, int64 `[runs]`.

    Raises:
        ValueError: shapes that don't fit, a row that is no distribution, a uniform outside [0, 1), a draft outside
            the vocabulary, or one that q can't have drawn.
    """
    p, q = _check_pair(p, q)
    drafts = check_drafts(drafts, q)
    accept_uniforms = check_uniforms("accept_uniforms", accept_uniforms, drafts.shape)
    resample_uniforms = check_uniforms("resample_uniforms", resample_uniforms, drafts.shape)
    # BEGIN SOLUTION
    at = drafts.unsqueeze(-1)
    accepted = accept_uniforms < (p.gather(-1, at) / q.gather(-1, at)).squeeze(-1)
    return accepted, torch.where(accepted, drafts, _draw(_residual(p, q), resample_uniforms))
    # END SOLUTION


# BEGIN SOLUTION
def _residual(p: Tensor, q: Tensor) -> Tensor:
    """The residual of rows that were checked: over a whole vocabulary a check costs as much as the rule itself."""
    excess = (p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total.where(total > 0, torch.ones_like(total)), p)


def _draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """A token from each of the rows, which were checked."""
    cumulative = probs.cumsum(-1)
    tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1).contiguous(), right=True).squeeze(-1)
    # Rounding may leave the total just below 1, and a uniform above it.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.minimum(tokens, last)


# END SOLUTION


def check_distributions(name: str, probs: Tensor) -> Tensor:
    """The rows in float64, with what rounding took from their sum given back.

    Raises:
        ValueError: no vocabulary axis, or a row with a negative or non-finite number or a sum that isn't 1.
    """
    if probs.dim() == 0 or probs.shape[-1] == 0 or not probs.is_floating_point():
        raise ValueError(f"{name} must be floating point [..., vocab_size], got {probs.dtype} {list(probs.shape)}")
    wide = probs.to(torch.float64)
    totals = wide.sum(-1, keepdim=True)
    bad = (wide < 0).any(-1) | ~((totals[..., 0] - 1).abs() <= ROUNDING)
    if bool(bad.any()):
        row = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{row} is no distribution: its numbers must be at least 0 and add up to 1")
    return wide / totals


def check_uniforms(name: str, uniforms: Tensor, shape: torch.Size) -> Tensor:
    """The uniforms in float64.

    Raises:
        ValueError: another shape, or a number outside [0, 1).
    """
    if uniforms.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(uniforms.shape)}")
    if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError(f"{name} must be at least 0 and below 1")
    return uniforms.to(torch.float64)


def check_drafts(drafts: Tensor, q: Tensor) -> Tensor:
    """The drafts, one for each row of q.

    Raises:
        ValueError: another shape or dtype, an id outside the vocabulary, or a token that q can't have drawn.
    """
    if drafts.shape != q.shape[:-1] or drafts.dtype != torch.int64:
        raise ValueError(f"drafts must be int64 {list(q.shape[:-1])}, got {drafts.dtype} {list(drafts.shape)}")
    if drafts.numel() and not 0 <= int(drafts.min()) <= int(drafts.max()) < q.shape[-1]:
        raise ValueError(f"drafts must be token ids from 0 to {q.shape[-1] - 1}, got {drafts.tolist()}")
    impossible = q.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) <= 0
    if bool(impossible.any()):
        row = impossible.nonzero()[0].tolist()
        raise ValueError(f"drafts{row} has probability 0 in q, so it was not drawn from q; give the q that was used")
    return drafts


def can_have_drawn(row: Tensor | None, token: int) -> bool:
    """Whether a token can have come from a row that nobody has checked; None is a row that is sure of it."""
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        return False
    if row is None:
        return True
    wide = row.to(torch.float64)
    fits = bool((wide >= 0).all()) and abs(float(wide.sum()) - 1) <= ROUNDING
    return fits and token < wide.numel() and float(wide[token]) > 0


def _check_pair(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Target and drafter in float64, of one shape."""
    if p.shape != q.shape:
        raise ValueError(f"p and q must have one shape, got {list(p.shape)} and {list(q.shape)}")
    return check_distributions("p", p), check_distributions("q", q)
