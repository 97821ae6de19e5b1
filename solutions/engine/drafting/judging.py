"""Which of a request's drafts its text keeps: lab 14's rule where they were drawn, comparison where they were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.drafting import Draft, DraftTree
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams
from solutions.speculative.drafts import draft_probs, widen
from solutions.speculative.rounds import ACCEPT, OWN, place_uniform
from solutions.speculative.tree import verify_tree
from solutions.speculative.tree_drafts import tree_width
from solutions.speculative.tree_loop import PLACE
from solutions.speculative.verification import verify


@dataclass(frozen=True)
class Verdict:
    """What came of a request's drafts.

    Args:
        tokens: that the text grows by: the drafts that were kept, and one more.
        path: indices of the kept drafts, each the parent of the next.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...] = ()


def had_no_choice(tree: DraftTree) -> bool:
    """Whether every draft was certain, given those before it: it doesn't matter then by which rule they are judged."""
    if tree.probs is None:
        return True
    rows = torch.arange(len(tree.tokens))
    return bool((tree.probs[rows, torch.tensor(tree.tokens, dtype=torch.int64)] == 1).all())


def judge_by_comparison(drawn: Sequence[int], tree: DraftTree) -> Verdict:
    """Walks down the tree as long as a draft is what plain decoding draws at its place.

    Args:
        drawn: what plain decoding would draw after the text, then after each draft.
        tree: the drafts.
    """
    tokens, path, node = [drawn[0]], list[int](), -1
    children = {
        (parent, token): index
        for index, (parent, token) in reversed(list(enumerate(zip(tree.parents, tree.tokens, strict=True))))
    }
    while (child := children.get((node, tokens[-1]))) is not None:
        path.append(child)
        tokens.append(drawn[child + 1])
        node = child
    return Verdict(tuple(tokens), tuple(path))


def judge_run(p: Tensor, run: DraftTree, params: SamplingParams, place: int) -> Verdict:
    """Lab 14's rule for drafts in a line, with lab 14's random numbers.

    Args:
        p: the target's distributions after filters and masks, `[drafts + 1, vocab_size]`.
        run: the drafts and what they were drawn from; the last may lie outside of the target's vocabulary.
        params: hold the seed.
        place: of the first draft, counted from the first generated token.
    """
    count = len(run.tokens)
    q = draft_probs(Draft(run.tokens, run.probs), count, p.shape[1])
    uniforms = [[place_uniform(params, place + i, use) for use in (ACCEPT, OWN)] for i in range(count + 1)]
    tokens, kept = verify(
        widen(p, q.shape[1])[None],
        q[None],
        torch.tensor([run.tokens], dtype=torch.int64),
        torch.tensor([uniforms], dtype=torch.float64),
    )
    return Verdict(tuple(tokens[0, : int(kept) + 1].tolist()), tuple(range(int(kept))))


def judge_tree(p: Tensor, tree: DraftTree, params: SamplingParams, place: int) -> Verdict:
    """Lab 14's rule for drafts in a tree; arguments as of `judge_run`."""
    rows = range(len(tree.tokens) + 1)
    uniforms = [[uniform(params.seed, place * PLACE + 2 * row + use) for use in (0, 1)] for row in rows]
    path, own = verify_tree(widen(p, tree_width(tree, p.shape[1])), tree, torch.tensor(uniforms, dtype=torch.float64))
    return Verdict((*(tree.tokens[index] for index in path), own), tuple(path))
