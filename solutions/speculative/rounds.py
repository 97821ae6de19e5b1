"""Task 3b: what a round may judge, whose random numbers are whose, and where the text ends."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from labkit.drafting import Draft
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams

from .drafts import usable_drafts

Finished = Callable[[list[int]], bool]
Allowed = Callable[[list[int]], Tensor]

DRAFT, ACCEPT, OWN = range(3)
"""What a random number of a place is for: to draw its draft, to judge it, to draw the target's own token."""


def place_uniform(params: SamplingParams, place: int, use: int) -> float:
    """The random number of a place for one use, `uniform(seed, 3 * place + use)`.

    Args:
        params: hold the seed.
        place: counts generated tokens, from 0.
        use: `DRAFT`, `ACCEPT` or `OWN`.
    """
    # BEGIN SOLUTION
    return uniform(params.seed, 3 * place + use)
    # END SOLUTION


def judgeable_drafts(
    draft: Draft, max_drafts: int, text: list[int], vocab_size: int, allowed: Allowed | None = None
) -> tuple[list[int], list[Tensor]]:
    """The drafts to judge, and the masks of the places that the target can read.

    A draft that is outside the target's vocabulary, or that its mask forbids, is the last one. It stays in, to be
    judged with p = 0: dropping it because of what it is would favour the other tokens.

    Args:
        draft: of a drafter that nobody trusts.
        max_drafts: what it was asked for.
        text: the text so far.
        vocab_size: of the target.
        allowed: called with the text and the drafts so far; the bool mask `[vocab_size]` of what may follow. None
            allows everything.

    Returns:
        The drafts, and a mask for the place behind the text and for each behind a draft that the target reads: one
        more than these drafts. A last draft that it doesn't read has none behind it.
    """
    # BEGIN SOLUTION
    drafts: list[int] = []
    masks = [_mask(text, vocab_size, allowed)]
    for token in draft.tokens[: usable_drafts(draft, max_drafts)]:
        drafts.append(token)
        if token >= vocab_size or not masks[-1][token]:
            break
        masks.append(_mask([*text, *drafts], vocab_size, allowed))
    return drafts, masks
    # END SOLUTION


def until_the_end(
    tokens: list[int],
    generated: list[int],
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
    finished: Finished | None = None,
) -> tuple[list[int], bool]:
    """The tokens of a round up to the one that ends the text, and whether one does.

    Args:
        tokens: what the round gave.
        generated: what was generated before.
        max_new_tokens: the most that may be generated in all.
        stop_tokens: ids that end the text.
        finished: called with the generated tokens after each of them, until it says True.
    """
    # BEGIN SOLUTION
    for count, token in enumerate(tokens, start=1):
        so_far = [*generated, *tokens[:count]]
        if token in stop_tokens or len(so_far) == max_new_tokens or (finished is not None and finished(so_far)):
            return tokens[:count], True
    return tokens, False
    # END SOLUTION


# BEGIN SOLUTION
def _mask(text: list[int], vocab_size: int, allowed: Allowed | None) -> Tensor:
    """Which tokens may follow, bool `[vocab_size]`."""
    return torch.ones(vocab_size, dtype=torch.bool) if allowed is None else allowed(list(text))


# END SOLUTION
