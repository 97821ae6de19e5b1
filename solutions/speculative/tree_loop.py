"""Task 8c: the loop of task 3 with trees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

# BEGIN SOLUTION
from dataclasses import dataclass

# END SOLUTION
import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.drafting import DraftTree, Round, Speculation, TreeDrafter
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams

from .drafts import widen
from .rounds import Allowed, Finished, until_the_end
from .tree import verify_tree
from .tree_drafts import tree_width, usable_tree
from .tree_model import TreeModel

Distribution = Callable[[Tensor, SamplingParams], Tensor]
Judge = Callable[[Tensor, DraftTree, Tensor], tuple[list[int], int]]

GREEDY = SamplingParams(temperature=0.0)
PLACE = 1 << 16
"""Random numbers of one place of the text: more than a tree has drafts."""


def speculate_tree(
    target: TreeModel,
    drafter: TreeDrafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    params: SamplingParams = GREEDY,
    stop_tokens: Collection[int] = (),
    finished: Finished | None = None,
    allowed: Allowed | None = None,
    distribution: Distribution = token_distribution,
    judge: Judge = verify_tree,
) -> Speculation:
    """Generate as the target alone would, with a tree of drafts in each pass.

    A round that begins at place n of the generated text uses `uniform(seed, n * PLACE + 2 * row + use)`, where row is
    a row of `verify_tree`'s uniforms and use is 0 to judge and 1 to draw. The drafter is given
    `uniform(seed, n * PLACE + PLACE // 2 + i)` for its draws i = 0, 1, ... up to 63.

    Args:
        target: empty, or it remembers what comes before the prompt.
        drafter: called as `propose_tree(prompt + generated, max_depth, uniforms)`. Whatever it does can cost speed,
            never correctness: see `usable_tree`. An exception of the drafter ends the generation.
        prompt: token ids, at least one.
        max_new_tokens: the most tokens to generate.
        params: how the target's tokens are drawn; temperature 0 by default.
        stop_tokens: ids that end the text, wherever in a round they come up.
        finished: called with the generated tokens after each of them; True ends the text there.
        allowed: called with prompt + generated + the drafts of a path; a bool mask `[vocab_size]` of the tokens that
            may follow. Others get probability 0 there, drafted or not. Never asked behind a draft that may not stand
            where it stands.
        distribution: called as `distribution(logits, params)`.
        judge: called as `judge(p, tree, uniforms)`, see `verify_tree`; with another one than that the text need not
            follow the target.

    Returns:
        The tokens and the rounds; `drafted` counts the drafts of the whole tree.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, a count that is no int of at least 1, or a text that
            exceeds the target's capacity. Nothing has run then.
    """
    ids = check_tokens("prompt", prompt, target.vocab_size)
    check_count("max_new_tokens", max_new_tokens, 1)
    if target.length + len(ids) + max_new_tokens - 1 > target.capacity:
        raise ValueError(
            f"{target.length} remembered tokens, a prompt of {len(ids)} and {max_new_tokens} new tokens exceed the "
            f"capacity of {target.capacity}"
        )
    # BEGIN SOLUTION
    text, generated, rounds = list(ids), list[int](), list[Round]()
    pending, ended = ids, False
    while not ended:
        depth = max_new_tokens - len(generated) - 1
        room = target.capacity - target.length - len(pending)
        now = open_tree(drafter, text, len(generated), depth, room, target.vocab_size, params, allowed)
        logits = target.append(pending, now.readable, now.parents)[len(pending) - 1 :]
        path, tokens = now.judged(distribution(now.masked(logits), params), judge)
        emitted, ended = until_the_end(tokens, generated, max_new_tokens, stop_tokens, finished)
        generated += emitted
        text += emitted
        rounds.append(Round(now.num_drafts, min(len(path), len(emitted)), len(emitted)))
        # The last token of the text is never read: a round that a kept draft ended leaves that draft out.
        target.keep(path[: len(emitted) - 1])
        pending = text[-1:]
    return Speculation(tuple(generated), tuple(rounds))
    # END SOLUTION


# BEGIN SOLUTION
@dataclass(frozen=True)
class TreeRound:
    """A round of one text, alone or in a batch: what the target is to read, and what it takes to judge its answer.

    Args:
        tree: the drafts to judge.
        readable: their ids in the pass. What the target can't read is never kept: any token may hold its place.
        masks: of the tokens that may follow the text and each draft, `[drafts + 1, vocab_size]`; None allows all.
        uniforms: `[drafts + 1, 2]`, to judge and to draw.
    """

    tree: DraftTree
    readable: list[int]
    masks: Tensor | None
    uniforms: Tensor

    @property
    def parents(self) -> Sequence[int]:
        """For each draft the index of the one before it, -1 for those that follow the text."""
        return self.tree.parents

    @property
    def num_drafts(self) -> int:
        """Drafts of the whole tree."""
        return len(self.tree.tokens)

    def masked(self, logits: Tensor) -> Tensor:
        """The rows that judge drafts, without the tokens that may not follow."""
        return logits if self.masks is None else logits.masked_fill(~self.masks, -torch.inf)

    def judged(self, p: Tensor, judge: Judge) -> tuple[list[int], list[int]]:
        """The path that is kept, and the tokens that come of it."""
        path, own = judge(widen(p, tree_width(self.tree, p.shape[1])), self.tree, self.uniforms)
        return path, [*(self.tree.tokens[index] for index in path), own]


def open_tree(
    drafter: TreeDrafter,
    text: list[int],
    place: int,
    depth: int,
    room: int,
    vocab_size: int,
    params: SamplingParams,
    allowed: Allowed | None,
) -> TreeRound:
    """Ask a drafter for a tree behind a text of which `place` tokens were generated.

    Args:
        drafter: nobody trusts it.
        text: so far.
        place: tokens of it that were generated.
        depth: the longest path.
        room: the most drafts.
        vocab_size: of the target.
        params: hold the seed.
        allowed: as in `speculate_tree`.
    """
    base = place * PLACE
    draws = [uniform(params.seed, base + PLACE // 2 + i) for i in range(64)]
    proposed = drafter.propose_tree(list(text), depth, draws) if depth else DraftTree((), ())
    tree = usable_tree(proposed, depth, room, vocab_size)
    readable = [token if token < vocab_size else 0 for token in tree.tokens]
    masks = None if allowed is None else _masks(tree, text, vocab_size, allowed)
    rows = range(len(tree.tokens) + 1)
    numbers = [[uniform(params.seed, base + 2 * row + use) for use in (0, 1)] for row in rows]
    return TreeRound(tree, readable, masks, torch.tensor(numbers, dtype=torch.float64))


def _masks(tree: DraftTree, text: list[int], vocab_size: int, allowed: Allowed) -> Tensor:
    """What may follow the text and each draft; all behind a draft that is never kept, where it doesn't matter."""
    masks = torch.ones(len(tree.tokens) + 1, vocab_size, dtype=torch.bool)
    masks[0] = allowed(list(text))
    paths: dict[int, list[int]] = {-1: []}
    for index, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent in paths and token < vocab_size and masks[parent + 1, token]:
            paths[index] = [*paths[parent], token]
            masks[index + 1] = allowed([*text, *paths[index]])
    return masks


# END SOLUTION
