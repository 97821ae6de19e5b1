"""The drafters of lab 14 by name, one for each request, and the hidden states that they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.drafting import Drafter, TreeDrafter

from ..memory.features import FeaturePool, RequestFeatures
from ..models.blocks import Decoder
from ..request import Request
from .speculation import DRAFTERS, MakeDrafter, SpeculationConfig, Speculator


def make_speculator(
    wanted: SpeculationConfig | str | None, model: Decoder, load: Callable[[], int], num_blocks: int, block_size: int,
    num_host_blocks: int, trees: bool = True,
) -> tuple[Speculator | None, FeaturePool | None]:  # fmt: skip
    """Who asks for drafts and judges them, and where the hidden states lie that drafters read.

    Args:
        wanted: see `EngineConfig.speculation`.
        model: the target.
        load: how many requests share a pass at present.
        num_blocks: of the KV pool.
        block_size: of the KV pool.
        num_host_blocks: of the KV pool.
        trees: whether the KV pool moves single tokens, as drafts that branch need.

    Raises:
        ValueError: an unknown name, a head that there isn't for this model, or drafts that branch where they can't.
    """
    if wanted is None or wanted == "none":
        return None, None
    config = SpeculationConfig(wanted) if isinstance(wanted, str) else wanted
    make_drafter, features = config.drafter, None
    if not trees and _drafts_trees(make_drafter):
        raise ValueError(
            f"drafts of {make_drafter!r} may branch, and KIVI, which stores a block at once, can't keep one branch of "
            f"them; take a drafter of lines, such as n-gram, or another kv_dtype"
        )
    if isinstance(make_drafter, str):
        named = _NamedDrafters(make_drafter, config, model, load)
        if named.layers:
            features = named.features = FeaturePool(named.layers, model, num_blocks, block_size, num_host_blocks)
        return Speculator(named, config.num_drafts, model.vocab_size), features
    make = make_drafter
    return Speculator(lambda request: make(), config.num_drafts, model.vocab_size), features


def _drafts_trees(drafter: str | MakeDrafter) -> bool:
    """Whether drafts of a drafter may branch."""
    if not isinstance(drafter, str):
        return isinstance(drafter(), TreeDrafter)
    # Imported here: the other drafters of lab 14 are for those who name one.
    from solutions.speculative.trained_drafters import TREES

    return DRAFTERS[drafter] in TREES


class _NamedDrafters:
    """Makes drafters of one kind.

    Args:
        name: of the kind.
        config: what else there is to say.
        model: the target.
        load: how many requests share a pass at present.
    """

    def __init__(self, name: str, config: SpeculationConfig, model: Decoder, load: Callable[[], int]) -> None:
        # Imported here: the other drafters of lab 14 are for those who name one.
        from solutions.speculative.trained_drafters import HeadDrafters

        self._kind = DRAFTERS[name]
        self._config = config
        self._load = load
        self._heads = HeadDrafters(_Target(model), folder=config.heads)
        self.features: FeaturePool | None = None
        try:
            self.layers = self._heads.layers(self._kind)
        except ValueError as error:
            raise ValueError(
                f"speculation by {name} needs a head that was trained for this very model: {error}. Take n-gram or "
                f"lookahead, which do without one"
            ) from error

    def __call__(self, request: Request) -> Drafter | TreeDrafter:
        """A drafter for one request."""
        from solutions.speculative.trained_drafters import TREES

        source = RequestFeatures(self.features, request)
        if self._kind in TREES:
            return self._heads.tree_drafter(self._kind, source)
        params = request.params if self._config.drawn else replace(request.params, temperature=0.0)
        return self._heads.run_drafter(self._kind, source, request.max_length, params, self._costs)

    def _costs(self) -> list[float]:
        """For the adaptive drafter, under the load of the moment."""
        return self._config.costs.shares(self._load(), self._config.num_drafts)


class _Target:
    """What a head takes of the engine's model: a `labkit.trained_heads.loading.HeadTarget`."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    @property
    def config(self) -> ModelConfig:
        """Its sizes."""
        return self._model.config

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Heads compute in float32 and on the host, whatever the model does. All that were trained here belong to a
        model that ties its embedding and its output matrix."""
        embedding = self._model.embedding.to("cpu", torch.float32)
        return {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
