"""Task 4: the experiment that shows it: many texts at once, and how far their tokens may be from the target's law."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.checks import check_count

from .acceptance import check_distributions, check_uniforms, draw
from .verification import NOTHING, verify


def speculate_many(
    target: Tensor, drafter: Tensor, first: Tensor, num_tokens: int, num_drafts: int, uniforms: Tensor
) -> Tensor:
    """Generate many independent texts by speculation, all their rounds side by side.

    Target and drafter are Markov chains, whose exact distributions everybody can compute: row i holds the
    probabilities of the tokens after token i. Each text goes its own pace: one that kept three drafts is four tokens
    ahead of one that kept none.

    Args:
        target: `[vocab_size, vocab_size]`.
        drafter: same shape.
        first: the token before each text, int64 `[runs]`.
        num_tokens: of each text, at least 1.
        num_drafts: k, the most drafts in a round, at least 0. Near its end a text gets fewer: its last token needs
            no draft.
        uniforms: `[runs, num_tokens, 3]`, each at least 0 and below 1: for each place of a text one number to draw
            its draft, one to judge that, one to draw the target's own token.

    Returns:
        int64 `[runs, num_tokens]`.

    Raises:
        ValueError: shapes that don't fit, a row that is no distribution, a token outside the vocabulary, or a count
            out of range.

    Source: module section 3.1, and the experiment that lab 14 is known for.
    """
    target, drafter = check_distributions("target", target), check_distributions("drafter", drafter)
    if target.dim() != 2 or target.shape[0] != target.shape[1] or drafter.shape != target.shape:
        raise ValueError(
            f"target and drafter must have shape [vocab_size, vocab_size], got {list(target.shape)} and "
            f"{list(drafter.shape)}"
        )
    check_count("num_tokens", num_tokens, 1)
    check_count("num_drafts", num_drafts, 0)
    if first.dim() != 1 or first.dtype != torch.int64 or not bool(((first >= 0) & (first < len(target))).all()):
        raise ValueError(f"first must be int64 [runs], ids below {len(target)}, got {first.dtype} {list(first.shape)}")
    uniforms = check_uniforms("uniforms", uniforms, torch.Size((len(first), num_tokens, 3)))
    # BEGIN SOLUTION
    texts = torch.full((len(first), num_tokens), NOTHING)
    place = torch.zeros_like(first)
    while bool((place < num_tokens).any()):
        runs = (place < num_tokens).nonzero()[:, 0]
        at = place[runs]
        # Places behind the end belong to padding; any number will do there.
        places = (at[:, None] + torch.arange(num_drafts + 1)).clamp(max=num_tokens - 1)
        numbers = uniforms[runs[:, None], places]
        newest = torch.where(at > 0, texts[runs, (at - 1).clamp(min=0)], first[runs])
        drafts, q, p = [newest], [], [target[newest]]
        for i in range(num_drafts):
            q.append(drafter[drafts[-1]])
            drafts.append(draw(q[-1], numbers[:, i, 0]))
            p.append(target[drafts[-1]])
        rows = torch.stack([*q, q[0] if q else p[0]], 1)[:, :num_drafts]
        counts = (num_tokens - at - 1).clamp(max=num_drafts)
        tokens, kept = verify(torch.stack(p, 1), rows, torch.stack(drafts, 1)[:, 1:], numbers[..., 1:], counts)
        for i in range(num_drafts + 1):
            emitted = i <= kept
            texts[runs[emitted], at[emitted] + i] = tokens[emitted, i]
        place[runs] = at + kept + 1
    return texts
    # END SOLUTION


def total_variation(tokens: Tensor, probs: Tensor) -> float:
    """How far the shares of sampled tokens are from probabilities: half the sum of |share - probability|.

    Args:
        tokens: int64 `[runs]`, at least one.
        probs: their supposed distribution `[vocab_size]`.

    Returns:
        From 0 to 1; no event's share is further from its probability than this.

    Raises:
        ValueError: no tokens, an id outside, or `probs` is no distribution.
    """
    probs = check_distributions("probs", probs)
    if tokens.dim() != 1 or not len(tokens) or not bool(((tokens >= 0) & (tokens < len(probs))).all()):
        raise ValueError(f"tokens must be ids below {len(probs)}, at least one, got {list(tokens.shape)}")
    # BEGIN SOLUTION
    shares = torch.bincount(tokens, minlength=len(probs)).double() / len(tokens)
    return float((shares - probs).abs().sum()) / 2
    # END SOLUTION


def total_variation_limit(probs: Tensor, runs: int, false_alarm: float) -> float:
    """The distance that a right sampler exceeds with at most the given probability.

    Shares scatter even if nothing is wrong. Token x has a share of standard deviation sqrt(p(1 - p) / runs), so the
    distance is on average at most half the sum of these. And one run moves it by no more than 1 / runs, so that by
    McDiarmid's inequality it is t above its mean with a probability of at most exp(-2 runs t^2).

    Args:
        probs: the distribution `[vocab_size]`.
        runs: independent samples, at least 1.
        false_alarm: the probability to accept, above 0 and below 1.

    Returns:
        half the sum of sqrt(p(1 - p) / runs), plus sqrt(ln(1 / false_alarm) / (2 runs)).

    Raises:
        ValueError: `probs` is no distribution, or a number is out of range.
    """
    probs = check_distributions("probs", probs)
    check_count("runs", runs, 1)
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm must be above 0 and below 1, got {false_alarm!r}")
    # BEGIN SOLUTION
    scatter = float((probs * (1 - probs) / runs).sqrt().sum()) / 2
    return scatter + math.sqrt(math.log(1 / false_alarm) / (2 * runs))
    # END SOLUTION
