"""Holds candidates as linked nodes, picks them with a heap, and keeps the line of each row."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.draft_head import DraftHead
from labkit.drafting import DraftTree
from labkit.features import FeatureSource
from labkit.sampling_params import SamplingParams

from .feature_drafter import Distribution, FeatureDrafter, can_be_drawn_from

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
    root = _Node(-1, None, 0.0, 0)
    found: list[_Node] = []
    level, rows = [root], list(first[None])
    known = 0
    for step in range(depth):
        fresh = [child for node, row in zip(level, rows, strict=True) for child in _children(node, row, width)]
        for child in fresh:
            child.order = len(found)
            found.append(child)
        level = heapq.nsmallest(width, fresh, key=lambda node: (-node.confidence, node.order))
        if not level or step + 1 == depth:
            break
        parents = [-1 if node.parent is root else node.parent.number for node in level if node.parent is not None]
        answer = expand([node.token for node in level], parents)
        if answer is None:
            break
        for node in level:
            node.number = known
            known += 1
        rows = list(answer)
    kept = heapq.nsmallest(size, found, key=lambda node: (-node.confidence, node.order))
    kept.sort(key=lambda node: node.order)
    places = {id(node): index for index, node in enumerate(kept)}
    return DraftTree(tuple(node.token for node in kept), tuple(places.get(id(node.parent), -1) for node in kept))
    # END SOLUTION


# BEGIN SOLUTION
@dataclass(eq=False)
class _Node:
    """A candidate, its parent, and the number that it got when it was expanded."""

    token: int
    parent: _Node | None
    confidence: float
    order: int
    number: int = -1


def _children(node: _Node, row: Tensor, width: int) -> list[_Node]:
    """The likeliest tokens behind a node."""
    values, tokens = row.sort(descending=True)
    pairs = list(zip(values.tolist(), tokens.tolist(), strict=True))[:width]
    return [_Node(token, node, node.confidence + value, 0) for value, token in pairs if value != -torch.inf]


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
        if max_depth == 0:
            return DraftTree((), ())
        newest = self.follow(tokens)
        if newest is None:
            return DraftTree((), ())
        first = self._log_probs(newest)
        if first is None:
            return DraftTree((), ())
        text = self._head.length
        states: list[Tensor] = []
        lines: list[list[int]] = []

        def expand(drafts: list[int], parents: list[int]) -> Tensor | None:
            old = len(states)
            for index, parent in enumerate(parents):
                lines.append([*(lines[parent] if parent >= 0 else []), old + index])
            mask = torch.zeros(len(drafts), text + len(lines), dtype=torch.bool)
            mask[:, :text] = True
            for row, line in enumerate(lines[old:]):
                mask[row, [text + place for place in line]] = True
            positions = torch.tensor([text + len(line) - 1 for line in lines[old:]])
            hidden = torch.stack([newest[0] if parent < 0 else states[parent] for parent in parents])
            states.extend(self._head.append(hidden, torch.tensor(drafts), positions, mask))
            return self._log_probs(torch.stack(states[old:]))

        tree = grow_tree(first[0], expand, self._width, min(self._depth, max_depth), self._size)
        self._head.truncate(text)
        return tree
        # END SOLUTION

    # BEGIN SOLUTION
    def _log_probs(self, states: Tensor) -> Tensor | None:
        """What the head says behind each state, or None if it says nothing."""
        logits = self._head.logits(states).to(torch.float64)
        return logits.log_softmax(-1) if can_be_drawn_from(logits) else None

    # END SOLUTION
