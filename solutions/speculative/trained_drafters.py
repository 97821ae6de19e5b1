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
from labkit.trained_heads import HEADS, DraftModel, TrainedHead, load_head
from labkit.trained_heads.loading import FOLDER, HeadTarget

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

HeadDrafter = MedusaDrafter | DynamicTreeDrafter | LookaheadDrafter

RUNS = ("n-gram", "draft model", "EAGLE", "EAGLE-3", "MTP", "adaptive")
"""Drafters of runs."""
TREES = ("Medusa", "EAGLE-2", "lookahead")
"""Drafters of trees."""
_FILES = {"draft model": "draft", "Medusa": "medusa", "EAGLE": "eagle", "EAGLE-2": "eagle", "EAGLE-3": "eagle3",
          "adaptive": "eagle3", "MTP": "mtp"}  # fmt: skip
_HEADS = {"EAGLE": EagleHead, "EAGLE-2": EagleHead, "EAGLE-3": Eagle3Head, "MTP": MtpHead}


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


class HeadDrafters:
    """New drafters for every text of one target; a head is loaded when the first drafter asks for it.

    Args:
        target: its embeddings and its output matrix are used, not copied.
        shape: of trees.
        folder: where the heads lie.
    """

    def __init__(self, target: HeadTarget, shape: TreeShape | None = None, folder: Path = FOLDER) -> None:
        self._target = target
        self._shape = shape or TreeShape()
        self._folder = folder
        self._loaded: dict[str, TrainedHead] = {}

    def head(self, name: str) -> TrainedHead:
        """One of `labkit.trained_heads.HEADS`.

        Raises:
            ValueError: it is missing, damaged or of another target.
        """
        if name not in self._loaded:
            self._loaded[name] = load_head(name, self._target, self._folder)
        return self._loaded[name]

    def layers(self, kind: str) -> tuple[int, ...]:
        """The hidden states of the target that a drafter reads; none if it reads the text alone."""
        return self.head(_FILES[kind]).layers if kind in _FILES else ()

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
            ValueError: another kind, or its head can't be loaded.
        """
        if kind == "n-gram":
            return NgramDrafter()
        if kind == "draft model":
            return ModelDrafter(DraftModel(self.head("draft"), capacity), params)
        if kind == "adaptive":
            return AdaptiveDrafter(self.run_drafter("EAGLE-3", source, capacity, params), costs, draft_cost=0.1)
        if kind not in _HEADS or kind not in RUNS:
            raise ValueError(f"kind must be one of {', '.join(RUNS)}, got {kind!r}")
        own = self.head(_FILES[kind])
        return FeatureDrafter(source, _HEADS[kind](own.config, own.weights, own.target_ids), params)

    def tree_drafter(self, kind: str, source: FeatureSource) -> HeadDrafter:
        """A drafter of trees for one text.

        Args:
            kind: one of `TREES`.
            source: of the text's features.

        Raises:
            ValueError: another kind, or its head can't be loaded.
        """
        if kind == "lookahead":
            return lookahead_drafter()
        if kind == "Medusa":
            own = self.head("medusa")
            accuracy = torch.tensor(own.card["accuracy_by_rank"])
            paths = medusa_paths(accuracy, self._shape.size)
            return MedusaDrafter(source, own.weights, paths, own.config.vocab_size, own.target_ids)
        if kind != "EAGLE-2":
            raise ValueError(f"kind must be one of {', '.join(TREES)}, got {kind!r}")
        own = self.head("eagle")
        head = EagleHead(own.config, own.weights, own.target_ids)
        return DynamicTreeDrafter(source, head, self._shape.width, self._shape.depth, self._shape.size)


class TrainedDrafters(HeadDrafters):
    """All heads of one target, loaded once, and the targets that go with their drafters.

    Args:
        decoder: the target.
        shape: of trees.
        folder: where the heads lie.

    Raises:
        ValueError: a head is missing, damaged or of another target.
    """

    def __init__(self, decoder: Decoder, shape: TreeShape | None = None, folder: Path = FOLDER) -> None:
        super().__init__(decoder, shape, folder)
        self.decoder = decoder
        for name in HEADS:
            self.head(name)

    def layers(self, kind: str) -> tuple[int, ...]:
        """As of `HeadDrafters`; a target shows some hidden states even to those who read none."""
        return super().layers(kind) or super().layers("EAGLE")

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
    """A lookahead drafter whose trees are as small as the others'."""
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
