"""Task 8a: several guesses at once: who sees whom, where each stands, and which of them come true."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.drafting import DraftTree

from .acceptance import check_distributions, check_uniforms, draw, residual


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Which drafts a draft may attend to: itself and those that lead to it.

    Args:
        parents: for each draft the index of the one before it, -1 for those that follow the text itself.

    Returns:
        bool `[drafts, drafts]`; row i is True at i and at its ancestors. The text itself is seen by all.
    """
    # BEGIN SOLUTION
    mask = torch.eye(len(parents), dtype=torch.bool)
    for index, parent in enumerate(parents):
        if parent >= 0:
            mask[index] |= mask[parent]
    return mask
    # END SOLUTION


def tree_positions(parents: Sequence[int], start: int) -> Tensor:
    """The position of each draft in its own text: siblings stand at the same place.

    Args:
        parents: as for `ancestor_mask`.
        start: position of the first token behind the text, at least 0.

    Returns:
        int64 `[drafts]`.

    Raises:
        ValueError: `start` is no int of at least 0.
    """
    check_count("start", start, 0)
    # BEGIN SOLUTION
    return start - 1 + ancestor_mask(parents).sum(1)
    # END SOLUTION


def verify_tree(p: Tensor, tree: DraftTree, uniforms: Tensor) -> tuple[list[int], int]:
    """Walk down the tree as far as the target agrees, and add one token of its own.

    The children of a node are judged one after another. The first is judged as a single draft would be; after a
    rejection the target wants only the residual, so that this is what the next sibling is judged by, and what the
    target's own token is drawn from if all are rejected. Whoever is kept becomes the node to go on from.

    Args:
        p: the target's distributions `[drafts + 1, vocab_size]`: row 0 after the text, row i + 1 after draft i.
        tree: the drafts; each row of `tree.probs` is above 0 at its token.
        uniforms: `[drafts + 1, 2]`, each at least 0 and below 1. `uniforms[i + 1, 0]` judges draft i; `uniforms[j, 1]`
            draws the target's own token if it follows row j of p.

    Returns:
        The indices of the kept drafts, from the text on, and the token that follows them.

    Raises:
        ValueError: shapes that don't fit, a row that is no distribution, a uniform outside [0, 1), or a draft that
            its row can't have drawn.

    Source: Miao et al. 2023 (2305.09781); module section 3.4.
    """
    count = len(tree.tokens)
    p = check_distributions("p", p)
    if p.dim() != 2 or p.shape[0] != count + 1:
        raise ValueError(f"p must have {count + 1} rows for {count} drafts, got {list(p.shape)}")
    uniforms = check_uniforms("uniforms", uniforms, torch.Size((count + 1, 2)))
    q = _draft_rows(tree, p.shape[1])
    # BEGIN SOLUTION
    kept: list[int] = []
    node = -1
    while True:
        wanted, after = p[node + 1], node
        for child in range(node + 1, count):
            if tree.parents[child] != node:
                continue
            token = tree.tokens[child]
            if float(uniforms[child + 1, 0]) < float(wanted[token] / q[child, token]):
                kept.append(child)
                after = child
                break
            wanted = residual(wanted, q[child])
        if after == node:
            return kept, int(draw(wanted, uniforms[node + 1, 1]))
        node = after
    # END SOLUTION


def _draft_rows(tree: DraftTree, vocab_size: int) -> Tensor:
    """The distributions of the drafts; rows of a drafter without choice are 1 at their token."""
    tokens = torch.tensor(tree.tokens, dtype=torch.int64)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"drafts must be token ids from 0 to {vocab_size - 1}, got {list(tree.tokens)}")
    if tree.probs is None:
        return torch.nn.functional.one_hot(tokens, vocab_size).to(torch.float64)
    if tree.probs.shape != (len(tokens), vocab_size):
        raise ValueError(f"tree.probs must have shape {[len(tokens), vocab_size]}, got {list(tree.probs.shape)}")
    rows = check_distributions("tree.probs", tree.probs)
    impossible = rows[torch.arange(len(tokens)), tokens] <= 0
    if bool(impossible.any()):
        raise ValueError(f"draft {int(impossible.int().argmax())} has probability 0 in its own row of tree.probs")
    return rows
