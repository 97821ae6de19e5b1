"""Task 12a: Medusa: heads beside the target's own, each of which looks one token further."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.draft_head import check_draft_vocabulary, spread
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
    name = f"heads.{head}"
    inner = torch.nn.functional.linear(features, weights[f"{name}.linear.weight"], weights[f"{name}.linear.bias"])
    own = f"{name}.lm_head.weight"
    output = weights[own if own in weights else "lm_head.weight"]
    return torch.nn.functional.linear(features + torch.nn.functional.silu(inner), output)
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
    heads, ranks = accuracy.shape
    rates = accuracy.to(torch.float64).tolist()
    chosen: list[Path] = []
    # Paths whose parent is in the tree, with the chance that they are right.
    open_paths: dict[Path, float] = {(rank,): rates[0][rank] for rank in range(ranks)}
    while open_paths and len(chosen) < size:
        best = min(open_paths, key=lambda path: (-open_paths[path], len(path), path))
        chance = open_paths.pop(best)
        chosen.append(best)
        if len(best) < heads:
            open_paths.update({(*best, rank): chance * rates[len(best)][rank] for rank in range(ranks)})
    return chosen
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
        ValueError: weights without a head or an output matrix, no paths, one twice, one without its parent before it,
            a rank that is no int from 0 to the draft vocabulary's end, a path that is longer than there are heads, or
            ids that don't fit the output matrix.
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
        features = self._target.features()
        paths = [path for path in self._paths if len(path) <= max_depth]
        if not paths or len(text) < 2 or features.shape[0] < len(text) - 1:
            return DraftTree((), ())
        choices: list[list[int]] = []
        for head in range(max(map(len, paths))):
            logits = spread(medusa_logits(self._weights, features[-1], head), self._target_ids, self._vocab_size)
            if bool(logits.isnan().any()):
                return DraftTree((), ())
            ranks = 1 + max(path[head] for path in paths if len(path) > head)
            choices.append(logits.topk(ranks).indices.tolist())
        nodes = {path: index for index, path in enumerate(paths)}
        return DraftTree(
            tuple(choices[len(path) - 1][path[-1]] for path in paths),
            tuple(nodes.get(path[:-1], -1) for path in paths),
        )
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
