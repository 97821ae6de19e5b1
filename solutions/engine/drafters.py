"""The drafters of lab 14 by name, one for each request, and the hidden states that they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.drafting import Drafter, TreeDrafter

from .features import FeaturePool, RequestFeatures
from .models.blocks import Decoder
from .request import Request
from .speculation import SpeculationConfig

_KINDS = {"n-gram": "n-gram", "draft-model": "draft model", "medusa": "Medusa", "eagle": "EAGLE", "eagle-2": "EAGLE-2",
          "eagle-3": "EAGLE-3", "mtp": "MTP", "lookahead": "lookahead", "adaptive": "adaptive"}  # fmt: skip
"""What lab 14 calls them."""


@dataclass(frozen=True)
class _Target:
    """What a head takes of the engine's model: a `labkit.trained_heads.loading.HeadTarget`."""

    config: ModelConfig
    weights: Mapping[str, Tensor]


class NamedDrafters:
    """Makes drafters of one kind.

    Args:
        config: names the kind.
        model: the target.
        num_blocks: of the KV pool.
        block_size: of the KV pool.
        num_host_blocks: of the KV pool.
        load: how many requests share a pass at present.

    Raises:
        ValueError: there is no head of this kind for the model.
    """

    def __init__(
        self, config: SpeculationConfig, model: Decoder, num_blocks: int, block_size: int, num_host_blocks: int,
        load: Callable[[], int],
    ) -> None:  # fmt: skip
        # Imported here: the other drafters of lab 14 are for those who name one.
        from solutions.speculative.trained_drafters import HeadDrafters

        assert isinstance(config.drafter, str)
        self._kind = _KINDS[config.drafter]
        self._config = config
        self._load = load
        self._heads = HeadDrafters(_target(model), folder=config.heads)
        try:
            layers = self._heads.layers(self._kind)
        except ValueError as error:
            raise ValueError(
                f"speculation by {config.drafter} needs a head that was trained for this very model: {error}. "
                f"n-gram and lookahead do without one"
            ) from error
        self.features: FeaturePool | None = None
        if layers:
            self.features = FeaturePool(layers, model, num_blocks, block_size, num_host_blocks)

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


def _target(model: Decoder) -> _Target:
    """Heads compute in float32 and on the host, whatever the model does."""
    embedding = model.embedding.to("cpu", torch.float32)
    # The heads that there are belong to a model that ties the two; another one is refused before they are used.
    return _Target(model.config, {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
