"""Task 14: EAGLE-2: a tree that grows where the head is sure of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.draft_head import DraftHead
from labkit.drafting import DraftTree
from labkit.features import FeatureSource
from labkit.sampling_params import SamplingParams

from .feature_drafter import Distribution, FeatureDrafter, can_be_drawn_from
from .tree import ancestor_mask

Expand = Callable[[list[int], list[int]], Tensor | None]

GREEDY = SamplingParams(temperature=0.0)


def grow_tree(first: Tensor, expand: Expand, width: int, depth: int, size: int) -> DraftTree:
    """The drafts that the head holds likeliest, of the many that it has looked at.

    A draft's confidence is the product of the probabilities on its path: the chance that it is kept, as far as the
    head knows. *Expand*: the `width` likeliest tokens of each node in the level become candidates; of the new
    candidates the `width` most confident are the next level. *Rerank*: of the candidates of all levels the `size` most
    confident make the tree. A shallow one that was never expanded may well beat a deep one that was.

    Args:
        first: log-probabilities of the tokens behind the text, `[vocab_size]`; -inf for tokens that are no candidates.
        expand: called once for each level but the last as `expand(tokens, parents)`, with the candidates of the level,
            the most confident first, and for each the number of its parent among all nodes that were expanded before,
            counted from 0 in the order in which they were given, -1 for the text. Returns log-probabilities
            `[tokens, vocab_size]`, or None if nothing can be said: then the tree ends there.
        width: tokens of a node, and nodes of a level, at least 1.
        depth: levels, at least 0.
        size: the most drafts of the tree, at least 1.

    Returns:
        A tree without probabilities, level by level; within a level by parents, siblings from likely to unlikely.
        Of equal confidence, the candidate that was found first comes first.

    Raises:
        ValueError: a number that is no int or too small.

    Source: Li et al. 2024 (2406.16858), section 4; module section 3.4.
    """
    check_count("width", width, 1)
    check_count("depth", depth, 0)
    check_count("size", size, 1)
    # BEGIN SOLUTION
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    expanded: list[int] = []
    level, log_probs = [-1], first[None]
    for step in range(depth):
        start = len(tokens)
        for node, row in zip(level, log_probs, strict=True):
            best = row.topk(min(width, row.numel()))
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if value > -torch.inf:
                    tokens.append(token)
                    parents.append(node)
                    confidence.append(value + (confidence[node] if node >= 0 else 0.0))
        level = sorted(range(start, len(tokens)), key=lambda node: -confidence[node])[:width]
        if step == depth - 1 or not level:
            break
        places = [expanded.index(parents[node]) if parents[node] >= 0 else -1 for node in level]
        answer = expand([tokens[node] for node in level], places)
        if answer is None:
            break
        expanded += level
        log_probs = answer
    # No draft is surer than its parent, which was found before it: whoever is among the first has its parent there.
    kept = sorted(sorted(range(len(tokens)), key=lambda node: -confidence[node])[:size])
    new = {-1: -1, **{node: index for index, node in enumerate(kept)}}
    return DraftTree(tuple(tokens[node] for node in kept), tuple(new[parents[node]] for node in kept))
    # END SOLUTION


class DynamicTreeDrafter(FeatureDrafter):
    """A head on the target's hidden states that drafts a tree; runs of drafts it proposes as in task 13.

    Args:
        target: as in task 13.
        head: as in task 13.
        width: as in `grow_tree`.
        depth: as in `grow_tree`, at least 1.
        size: as in `grow_tree`.
        params: how drafts of a run are drawn; a tree isn't drawn, and always goes by the plain softmax.
        distribution: called as `distribution(logits, params)`.

    Raises:
        ValueError: a number that is no int of at least 1.
    """

    def __init__(
        self,
        target: FeatureSource,
        head: DraftHead,
        width: int = 8,
        depth: int = 5,
        size: int = 24,
        params: SamplingParams = GREEDY,
        distribution: Distribution = token_distribution,
    ) -> None:
        super().__init__(target, head, params, distribution)
        for name, value in (("width", width), ("depth", depth), ("size", size)):
            check_count(name, value, 1)
        self._width = width
        self._depth = depth
        self._size = size

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float] = ()) -> DraftTree:
        """Grow a tree with one `append` of the head for each level.

        A row that is expanded holds the state of its parent and its own token, sees the text's rows, those of its
        ancestors and itself, and stands at the position behind its parent. Afterwards the head remembers the rows of
        the text alone.

        Args:
            tokens: the text so far, at least one.
            max_depth: the longest path, at least 0.
            uniforms: not used, nothing is left to chance.

        Returns:
            `grow_tree` of the head's log-probabilities. Nothing where `follow` has nothing; the tree ends at a level
            in which a row of logits holds NaN, +inf, or nothing above -inf.

        Raises:
            ValueError: an empty text, or `max_depth` no int of at least 0. Nothing has run then.
        """
        check_tokens("tokens", tokens)
        check_count("max_depth", max_depth, 0)
        # BEGIN SOLUTION
        newest = self.follow(tokens) if max_depth else None
        first = None if newest is None else self._log_probs(newest)
        if newest is None or first is None:
            return DraftTree((), ())
        text = self._head.length
        # Row 0 is the newest token's state, row i + 1 that of the node expanded as number i.
        states = newest
        above: list[int] = []
        levels = 0

        def expand(drafts: list[int], parents: list[int]) -> Tensor | None:
            nonlocal states, levels
            above.extend(parents)
            seen = torch.nn.functional.pad(ancestor_mask(above)[-len(drafts) :], (text, 0), value=True)
            hidden = states[[parent + 1 for parent in parents]]
            new = self._head.append(hidden, torch.tensor(drafts), torch.full((len(drafts),), text + levels), seen)
            states = torch.cat([states, new])
            levels += 1
            return self._log_probs(new)

        tree = grow_tree(first[0], expand, self._width, min(self._depth, max_depth), self._size)
        self._head.truncate(text)
        return tree
        # END SOLUTION

    # BEGIN SOLUTION
    def _log_probs(self, states: Tensor) -> Tensor | None:
        """What the head says behind each state, or None if it says nothing."""
        logits = self._head.logits(states)
        # float32 is enough to choose by, and over a whole vocabulary many times as fast as float64.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.log_softmax(-1) if can_be_drawn_from(logits) else None

    # END SOLUTION
