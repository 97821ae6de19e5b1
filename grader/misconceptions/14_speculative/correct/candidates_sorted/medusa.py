"""Sorts all paths there are, and looks each choice up by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.draft_head import check_draft_vocabulary
from labkit.drafting import DraftTree
from labkit.features import FeatureSource

Path = tuple[int, ...]


def medusa_logits(weights: Mapping[str, Tensor], features: Tensor, head: int) -> Tensor:
    """What one head says of a token further on.

    The target's own head reads token i + 1 from the feature of token i; head k, from 0, reads token i + 2 + k from
    the same feature, whatever stands between. It is a residual block, x + silu(linear(x)), and an output matrix.

    Args:
        weights: "heads.<k>.linear.weight" `[hidden, hidden]` and "heads.<k>.linear.bias" `[hidden]` of each head, and
            its "heads.<k>.lm_head.weight" `[draft vocabulary, hidden]`, or else one "lm_head.weight" for all.
        features: the target's last hidden state, as its own head reads it, `[..., hidden]`.
        head: number of the head, from 0.

    Returns:
        `[..., draft vocabulary]`. Differentiable.

    Source: Cai et al. 2024 (2401.10774), section 2.1.1; module section 3.4.
    """
    # BEGIN SOLUTION
    matrix, bias = weights[f"heads.{head}.linear.weight"], weights[f"heads.{head}.linear.bias"]
    inner = features @ matrix.T + bias
    mixed = features + inner * inner.sigmoid()
    for name in (f"heads.{head}.lm_head.weight", "lm_head.weight"):
        if name in weights:
            break
    return mixed @ weights[name].T
    # END SOLUTION


def medusa_paths(accuracy: Tensor, size: int) -> list[Path]:
    """The tree of candidates that is likeliest to be right, for a number of drafts.

    A node is named by its path: (0, 2) is the third choice of head 1 below the first choice of head 0. Taking the
    heads for independent, a path is right with the product of its accuracies, and a tree keeps as many drafts on
    average as these products add up to. Nodes are therefore taken greedily, the likeliest first.

    Args:
        accuracy: `[heads, ranks]`, how often the choice of each rank is right, from 0 to 1, falling along the ranks.
        size: drafts in the tree, at least 1; fewer come if there are no more paths.

    Returns:
        Paths, parents before their children. Of two that are equally likely the shorter one comes first, then the
        one of lower ranks.

    Raises:
        ValueError: `accuracy` isn't `[heads, ranks]`, holds something else than numbers from 0 to 1, or rises along
            the ranks; or `size` is no int of at least 1.

    Source: Cai et al. 2024 (2401.10774), section 2.3.3.
    """
    check_count("size", size, 1)
    if accuracy.dim() != 2 or accuracy.numel() == 0 or not bool(((accuracy >= 0) & (accuracy <= 1)).all()):
        raise ValueError(f"accuracy must be [heads, ranks] of numbers from 0 to 1, got {accuracy.tolist()}")
    if bool((accuracy.diff(dim=1) > 0).any()):
        raise ValueError(f"accuracy must not rise along the ranks of a head, got {accuracy.tolist()}")
    # BEGIN SOLUTION
    # Since rates fall along the ranks, a parent is at least as likely as its children: the best paths are a tree.
    heads, ranks = accuracy.shape
    paths = [path for depth in range(1, heads + 1) for path in itertools.product(range(ranks), repeat=depth)]
    rates = accuracy.to(torch.float64)
    chances = [math.prod(float(rates[head, rank]) for head, rank in enumerate(path)) for path in paths]
    order = sorted(range(len(paths)), key=lambda index: -chances[index])
    return [paths[index] for index in order[:size]]
    # END SOLUTION


class MedusaDrafter:
    """Drafts a tree of fixed shape from one feature, all its levels at once.

    Args:
        target: remembers the features of the text; its last layer alone, as its own head reads it.
        weights: of the heads, as for `medusa_logits`.
        paths: of the tree, as of `medusa_paths`.
        vocab_size: of the target.
        target_ids: int64, the target's id of each token of the draft vocabulary; None means that they are the same.

    Raises:
        ValueError: no paths, one twice, one without its parent before it, a rank that is no int from 0 to the draft
            vocabulary's end, a path that is longer than there are heads, or ids that don't fit the output matrix.
    """

    def __init__(
        self,
        target: FeatureSource,
        weights: Mapping[str, Tensor],
        paths: Sequence[Path],
        vocab_size: int,
        target_ids: Tensor | None = None,
    ) -> None:
        heads = sum(name.startswith("heads.") and name.endswith("linear.weight") for name in weights)
        sizes = [tensor.shape[0] for name, tensor in weights.items() if name.endswith("lm_head.weight")]
        if not heads or not sizes:
            raise ValueError(
                f"weights must hold heads.<k>.linear.weight and an lm_head.weight for each or all, got {list(weights)}"
            )
        _check_paths(paths, heads, min(sizes))
        check_draft_vocabulary(target_ids, min(sizes), vocab_size)
        self._target = target
        self._weights = weights
        self._paths = [tuple(path) for path in paths]
        self._vocab_size = vocab_size
        self._target_ids = target_ids

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float] = ()) -> DraftTree:
        """The choices of the heads along the paths.

        The newest token isn't read yet; the last feature is that of the token before it, whose next-but-one token
        head 0 reads: the first draft.

        Args:
            tokens: the text so far, at least one.
            max_depth: the longest path, at least 0; longer ones are left out.
            uniforms: not used, nothing is left to chance.

        Returns:
            A tree without probabilities, in the order of the paths. Nothing if the target hasn't read the text up to
            its last token, or if a head says something that is no number.

        Raises:
            ValueError: an empty text, or `max_depth` no int of at least 0.
        """
        text = check_tokens("tokens", tokens)
        check_count("max_depth", max_depth, 0)
        # BEGIN SOLUTION
        known = self._target.features()
        if len(text) == 1 or len(known) < len(text) - 1:
            return DraftTree((), ())
        tree: list[tuple[int, int]] = []
        places: dict[Path, int] = {}
        for path in self._paths:
            if len(path) > max_depth:
                continue
            logits = medusa_logits(self._weights, known[-1:], len(path) - 1)[0]
            if not bool((logits == logits).all()):
                return DraftTree((), ())
            draft = int(logits.sort(descending=True).indices[path[-1]])
            places[path] = len(tree)
            token = draft if self._target_ids is None else int(self._target_ids[draft])
            tree.append((token, places[path[:-1]] if len(path) > 1 else -1))
        return DraftTree(tuple(token for token, _ in tree), tuple(parent for _, parent in tree))
        # END SOLUTION


def _check_paths(paths: Sequence[Path], heads: int, ranks: int) -> None:
    """Refuse paths that are no tree, or that ask for more than the heads can say."""
    if not paths:
        raise ValueError("paths must hold at least one path, got none")
    seen: set[Path] = {()}
    for path in map(tuple, paths):
        for rank in path:
            check_count("a rank", rank, 0)
            if rank >= ranks:
                raise ValueError(f"path {path} asks for rank {rank}, but there are {ranks} tokens to choose from")
        if len(path) > heads:
            raise ValueError(f"path {path} is longer than the {heads} heads")
        if path in seen:
            raise ValueError(f"path {path} comes twice, or is empty")
        if path[:-1] not in seen:
            raise ValueError(f"path {path} comes without its parent {path[:-1]} before it")
        seen.add(path)
