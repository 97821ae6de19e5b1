"""Task 3a: what of a draft can be judged. Whatever a drafter hands over may cost speed, never correctness."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.drafting import Draft

from .acceptance import can_have_drawn


def usable_drafts(draft: Draft, max_drafts: int) -> int:
    """How many drafts, from the front, come with a distribution that can have drawn them.

    The run ends before the first row of `draft.probs` that is no distribution (NaN, negative, a sum that isn't 1), or
    that gives its own token no probability. Ids outside the target's vocabulary are not this function's business as
    long as the row reaches so far: the target gives them probability 0, and the rule of task 1 does the rest.

    Args:
        draft: of a drafter that nobody trusts.
        max_drafts: what it was asked for; more is not looked at.

    Returns:
        From 0 to `max_drafts`. 0 if `draft.probs` has another number of rows than there are tokens.
    """
    # BEGIN SOLUTION
    tokens, probs = draft.tokens[:max_drafts], draft.probs
    if probs is not None and (probs.dim() != 2 or probs.shape[0] != len(draft.tokens) or probs.shape[1] == 0):
        return 0
    for index, token in enumerate(tokens):
        if not can_have_drawn(None if probs is None else probs[index], token):
            return index
    return len(tokens)
    # END SOLUTION


def draft_probs(draft: Draft, count: int, vocab_size: int) -> Tensor:
    """The distributions of the first drafts, on a vocabulary that holds the target's as well as the drafter's.

    Args:
        draft: its first `count` tokens are usable.
        count: rows wanted.
        vocab_size: of the target. Where the drafter's differs only in padding, the shorter one is filled up with
            tokens of probability 0.

    Returns:
        float64 `[count, width]`, width at least `vocab_size`. Without `draft.probs` each row is 1 at its token.
    """
    # BEGIN SOLUTION
    # Without a usable draft the rows may be anything, one axis too few included.
    if draft.probs is None or count == 0:
        width = max([vocab_size, *(token + 1 for token in draft.tokens[:count])])
        return torch.nn.functional.one_hot(
            torch.tensor(draft.tokens[:count], dtype=torch.int64), width
        ).to(torch.float64)  # fmt: skip
    return widen(draft.probs[:count].to(torch.float64), max(vocab_size, draft.probs.shape[1]))
    # END SOLUTION


def widen(probs: Tensor, width: int) -> Tensor:
    """Rows `[rows, vocab_size]` filled up with tokens of probability 0 to `[rows, width]`."""
    return torch.nn.functional.pad(probs, (0, width - probs.shape[1]))
