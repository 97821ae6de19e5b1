"""Task 17: typical acceptance: keep what the target might well have said. It is NOT lossless."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.drafting import DraftTree

from .acceptance import check_distributions, check_uniforms, draw


def typical_threshold(p: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Tensor:
    """The probability that a token must exceed to pass for typical: min(epsilon, delta * exp(-entropy)).

    Where the target is sure, the entropy is near 0 and a draft needs epsilon; where many tokens would do, each of them
    has little, and less is asked.

    Args:
        p: the target's distributions `[..., vocab_size]`.
        epsilon: the most that is ever asked, above 0 and below 1.
        delta: what is asked of a distribution of entropy 0 if epsilon doesn't come first, above 0 and below 1.

    Returns:
        float64 `[...]`. The entropy is in nats.

    Raises:
        ValueError: a row that is no distribution, or a number outside these limits.

    Source: Cai et al. 2024 (2401.10774), section 2.3.1, with the numbers of its code.
    """
    p = check_distributions("p", p)
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")
    # BEGIN SOLUTION
    entropy = -p.xlogy(p).sum(-1)
    return (delta * (-entropy).exp()).clamp(max=epsilon)
    # END SOLUTION


def verify_typical(
    p: Tensor, tree: DraftTree, uniforms: Tensor, epsilon: float = 0.09, delta: float = 0.3
) -> tuple[list[int], int]:
    """Keep the longest path of typical drafts, and add one token of the target's own.

    NOT lossless: whatever is typical is kept whenever it is drafted, however often the target would have said
    something else, and what isn't never appears as a draft. The text follows neither p nor any other law that could
    be named beforehand. Only at temperature 0, where one token has probability 1, it is the target's own.

    Args:
        p: the target's distributions `[drafts + 1, vocab_size]`: row 0 after the text, row i + 1 after draft i.
        tree: the drafts; the rows that they were drawn from play no part.
        uniforms: `[drafts + 1, 2]` as for `verify_tree`; only `uniforms[j, 1]` is used, to draw the own token behind
            row j of p.
        epsilon: see `typical_threshold`.
        delta: see `typical_threshold`.

    Returns:
        The indices of the kept drafts, from the text on, and the token that follows them. Of paths of equal length
        the one whose end comes first in the tree is kept.

    Raises:
        ValueError: shapes that don't fit, a row that is no distribution, a uniform outside [0, 1), ids outside the
            vocabulary, or a threshold out of range.
    """
    p, count = check_distributions("p", p), len(tree.tokens)
    if p.dim() != 2 or p.shape[0] != count + 1:
        raise ValueError(f"p must have {count + 1} rows for {count} drafts, got {list(p.shape)}")
    if tree.tokens and not 0 <= min(tree.tokens) <= max(tree.tokens) < p.shape[1]:
        raise ValueError(f"drafts must be token ids from 0 to {p.shape[1] - 1}, got {list(tree.tokens)}")
    uniforms = check_uniforms("uniforms", uniforms, torch.Size((count + 1, 2)))
    # BEGIN SOLUTION
    least = typical_threshold(p, epsilon, delta)
    paths: dict[int, list[int]] = {-1: []}
    for draft, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent in paths and p[parent + 1, token] > least[parent + 1]:
            paths[draft] = [*paths[parent], draft]
    # max takes the first of equals, and the dictionary holds them in the order of the tree.
    end = max(paths, key=lambda draft: len(paths[draft]))
    return paths[end], int(draw(p[end + 1], uniforms[end + 1, 1]))
    # END SOLUTION
