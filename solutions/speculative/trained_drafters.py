"""Every drafter of the lab at work for the bundled model, under one roof: for measurements, proofs and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.decoder import Decoder
from labkit.drafting import Drafter, Speculation
from labkit.features import FeatureSource
from labkit.sampling_params import SamplingParams
from labkit.trained_heads import DraftModel, TrainedHead, load_head
from labkit.trained_heads.loading import FOLDER

from .adaptive import AdaptiveDrafter
from .batch_model import BatchModel
from .batch_requests import RunRequest, TreeRequest
from .dynamic_tree import DynamicTreeDrafter
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .feature_drafter import FeatureDrafter
from .feature_model import FeatureModel
from .lookahead import LookaheadDrafter, LookaheadModel
from .loop import GREEDY, speculate
from .medusa import MedusaDrafter, medusa_paths
from .model_drafter import ModelDrafter
from .mtp import MtpHead
from .ngram import NgramDrafter
from .tree_loop import speculate_tree

RUNS = ("n-gram", "draft model", "EAGLE", "EAGLE-3", "MTP", "adaptive")
"""Drafters of runs."""
TREES = ("Medusa", "EAGLE-2", "lookahead")
"""Drafters of trees."""
_HEADS = {"EAGLE": ("eagle", EagleHead), "EAGLE-2": ("eagle", EagleHead), "EAGLE-3": ("eagle3", Eagle3Head),
          "MTP": ("mtp", MtpHead)}  # fmt: skip


@dataclass(frozen=True)
class TreeShape:
    """How large the trees are. On a processor without tensor units each draft costs, so they are small.

    Args:
        width: of EAGLE-2's tree.
        depth: of EAGLE-2's tree.
        size: drafts of the trees of EAGLE-2 and Medusa.
    """

    width: int = 3
    depth: int = 4
    size: int = 7


class TrainedDrafters:
    """The heads of one target, loaded once, and new drafters for every text.

    Args:
        decoder: the target.
        shape: of trees.
        folder: where the heads lie.

    Raises:
        ValueError: a head is missing, damaged or of another target.
    """

    def __init__(self, decoder: Decoder, shape: TreeShape | None = None, folder: Path = FOLDER) -> None:
        self.decoder = decoder
        self._shape = shape or TreeShape()
        self._heads: dict[str, TrainedHead] = {
            name: load_head(name, decoder, folder) for name in ("draft", "medusa", "eagle", "eagle3", "mtp")
        }

    def layers(self, kind: str) -> tuple[int, ...]:
        """The hidden states of the target that a drafter reads."""
        return self._heads["eagle3" if kind in ("EAGLE-3", "adaptive") else "eagle"].layers

    def run_drafter(
        self,
        kind: str,
        source: FeatureSource,
        capacity: int,
        params: SamplingParams = GREEDY,
        costs: Callable[[], Sequence[float]] = lambda: (1.0, 1.1, 1.2, 1.3, 1.4),
    ) -> Drafter:
        """A drafter of runs for one text.

        Args:
            kind: one of `RUNS`.
            source: of the text's features.
            capacity: tokens of the text, at most.
            params: how drafts are drawn.
            costs: v(k), for the adaptive one.

        Raises:
            ValueError: another kind.
        """
        if kind == "n-gram":
            return NgramDrafter()
        if kind == "draft model":
            return ModelDrafter(DraftModel(self._heads["draft"], capacity), params)
        if kind == "adaptive":
            return AdaptiveDrafter(self.run_drafter("EAGLE-3", source, capacity, params), costs, draft_cost=0.1)
        if kind not in _HEADS or kind not in RUNS:
            raise ValueError(f"kind must be one of {', '.join(RUNS)}, got {kind!r}")
        name, head = _HEADS[kind]
        own = self._heads[name]
        return FeatureDrafter(source, head(own.config, own.weights, own.target_ids), params)

    def tree_drafter(self, kind: str, source: FeatureSource) -> MedusaDrafter | DynamicTreeDrafter:
        """A drafter of trees for one text; lookahead's reads no features.

        Raises:
            ValueError: another kind than "Medusa" and "EAGLE-2".
        """
        if kind == "Medusa":
            own = self._heads["medusa"]
            accuracy = torch.tensor(own.card["accuracy_by_rank"])
            paths = medusa_paths(accuracy, self._shape.size)
            return MedusaDrafter(source, own.weights, paths, own.config.vocab_size, own.target_ids)
        if kind != "EAGLE-2":
            raise ValueError(f"kind must be 'Medusa' or 'EAGLE-2', got {kind!r}")
        own = self._heads["eagle"]
        head = EagleHead(own.config, own.weights, own.target_ids)
        return DynamicTreeDrafter(source, head, self._shape.width, self._shape.depth, self._shape.size)

    def pair(
        self,
        kind: str,
        capacity: int,
        params: SamplingParams = GREEDY,
        feature_model: type[FeatureModel] = FeatureModel,
        lookahead_model: type[LookaheadModel] = LookaheadModel,
    ) -> tuple[Any, Any]:
        """A new target, and the drafter that reads along with it.

        Args:
            kind: one of `RUNS` or `TREES`.
            capacity: tokens of the text and of the drafts behind it, at most.
            params: how drafts of runs are drawn.
            feature_model: made as `feature_model(decoder, capacity, layers)`.
            lookahead_model: made as `lookahead_model(decoder, capacity, drafter)`.
        """
        if kind == "lookahead":
            lookahead = lookahead_drafter()
            return lookahead_model(self.decoder, capacity, lookahead), lookahead
        target = feature_model(self.decoder, capacity, self.layers(kind))
        if kind in TREES:
            return target, self.tree_drafter(kind, target)
        return target, self.run_drafter(kind, target, capacity, params)

    def request(
        self,
        kind: str,
        model: BatchModel,
        index: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        params: SamplingParams = GREEDY,
        num_drafts: int = 4,
    ) -> RunRequest | TreeRequest:
        """A text of a batch, with a new drafter that reads along with it.

        Args:
            kind: one of `RUNS` or `TREES`.
            model: the target, made for the `layers` of this kind.
            index: of the text in it.
            prompt: token ids.
            max_new_tokens: the most tokens to generate.
            params: how tokens and drafts of runs are drawn.
            num_drafts: the most drafts of a run.
        """
        if kind in RUNS:
            runs = self.run_drafter(kind, model.source(index), model.capacity, params)
            return RunRequest(tuple(prompt), max_new_tokens, runs, params, num_drafts)
        if kind != "lookahead":
            return TreeRequest(tuple(prompt), max_new_tokens, self.tree_drafter(kind, model.source(index)), params)
        lookahead = lookahead_drafter()
        model.let_observe(index, lookahead)
        return TreeRequest(tuple(prompt), max_new_tokens, lookahead, params)


def lookahead_drafter() -> LookaheadDrafter:
    """Small, as the other trees are."""
    return LookaheadDrafter(window=3, ngram=3, max_guesses=3)


def generate(
    kind: str,
    target: Any,
    drafter: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    params: SamplingParams = GREEDY,
    num_drafts: int = 4,
) -> Speculation:
    """One text by the loop that belongs to a kind; target and drafter are those of `TrainedDrafters.pair`."""
    if kind in TREES:
        return speculate_tree(target, drafter, prompt, max_new_tokens, params)
    return speculate(target, drafter, prompt, max_new_tokens, params, num_drafts)
