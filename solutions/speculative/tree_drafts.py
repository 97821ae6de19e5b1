"""Task 8c: what of a tree can be judged, and how wide its vocabulary is."""

from __future__ import annotations

import torch

from labkit.drafting import DraftTree

from .acceptance import can_have_drawn
from .drafts import widen


def usable_tree(tree: DraftTree, max_depth: int, room: int, vocab_size: int) -> DraftTree:
    """The part of a tree that can be judged without favouring anybody.

    A draft goes, and with it all that was built on it,

    - if it is deeper than `max_depth`, since the text ends before it;
    - if its parent is neither the text nor an earlier draft, which a `DraftTree` would have refused;
    - if its row is no distribution, or can't have drawn it: then its younger siblings go, too, because they are
      judged by what that row leaves;
    - if it follows a draft outside the target's vocabulary, which the target can't read. That one itself stays, to be
      judged with p = 0: dropping it because of what it is would favour the others;
    - if there is no room for it in the pass: those at the end of the list, whatever they are.

    Args:
        tree: of a drafter that nobody trusts.
        max_depth: the longest path that the text has room for.
        room: the most drafts in the pass.
        vocab_size: of the target.

    Returns:
        A tree whose `probs`, if it has any, are float64 `[drafts, width]` and reach over both vocabularies.
    """
    # BEGIN SOLUTION
    probs = tree.probs
    if probs is not None and (probs.dim() != 2 or probs.shape[0] != len(tree.tokens) or probs.shape[1] == 0):
        return DraftTree((), ())
    # Who may have children, and how deep it stands: neither dropped drafts, nor those with a bad child, nor those that
    # can't be read.
    depths = {-1: 0}
    kept: list[int] = []
    for index, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=False)):
        if depths.get(parent, max_depth) >= max_depth:
            continue
        if not can_have_drawn(None if probs is None else probs[index], token):
            del depths[parent]
            continue
        kept.append(index)
        if token < vocab_size:
            depths[index] = depths[parent] + 1
    del kept[max(room, 0) :]
    new = {-1: -1, **{old: index for index, old in enumerate(kept)}}
    return DraftTree(
        tuple(tree.tokens[index] for index in kept),
        tuple(new[tree.parents[index]] for index in kept),
        None if probs is None else widen(probs[kept].to(torch.float64), max(vocab_size, probs.shape[1])),
    )
    # END SOLUTION


def tree_width(tree: DraftTree, vocab_size: int) -> int:
    """How many ids there are in the target's vocabulary and the drafter's together."""
    if tree.probs is not None:
        return int(tree.probs.shape[1])
    return max([vocab_size, *(token + 1 for token in tree.tokens)])
