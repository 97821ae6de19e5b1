"""Task 8c: the loop of task 3 with trees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.distribution import token_distribution
from labkit.drafting import DraftTree, Round, Speculation, TreeDrafter
from labkit.randomness import uniform
from labkit.sampling_params import SamplingParams

from .drafts import widen
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
            never correctness: see `usable_tree`.
        prompt: token ids, at least one.
        max_new_tokens: the most tokens to generate.
        params: how the target's tokens are drawn; temperature 0 by default.
        stop_tokens: ids that end the text, wherever in a round they come up.
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
    pending = ids
    while True:
        base, depth = len(generated) * PLACE, max_new_tokens - len(generated) - 1
        draws = [uniform(params.seed, base + PLACE // 2 + i) for i in range(64)]
        proposed = drafter.propose_tree(list(text), depth, draws) if depth else DraftTree((), ())
        room = target.capacity - target.length - len(pending)
        tree = usable_tree(proposed, depth, room, target.vocab_size)
        # What the target can't read is never kept: any token may hold its place in the pass.
        readable = [token if token < target.vocab_size else 0 for token in tree.tokens]
        logits = target.append(pending, readable, tree.parents)[len(pending) - 1 :]
        rows = range(len(tree.tokens) + 1)
        numbers = [[uniform(params.seed, base + 2 * row + use) for use in (0, 1)] for row in rows]
        p = widen(distribution(logits, params), tree_width(tree, target.vocab_size))
        path, own = judge(p, tree, torch.tensor(numbers, dtype=torch.float64))
        emitted = [*(tree.tokens[index] for index in path), own]
        ends = [i for i, token in enumerate(emitted, start=1) if token in stop_tokens]
        count = min([*ends, len(emitted)])
        generated += emitted[:count]
        text += emitted[:count]
        rounds.append(Round(len(tree.tokens), min(len(path), count), count))
        ended = bool(ends) or len(generated) == max_new_tokens
        # The last token of the text is never read: a round that a kept draft ended leaves that draft out.
        target.keep(path[: count - 1])
        if ended:
            return Speculation(tuple(generated), tuple(rounds))
        pending = text[-1:]
    # END SOLUTION
