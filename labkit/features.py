"""A decoder that shows what it thought: the hidden states that drafters with a head of their own read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.config import ModelConfig
from labkit.decoder import Attend, Decoder
from labkit.protocols import Spec


class RecordingDecoder(Decoder):
    """The decoder, and the hidden states of chosen layers from its last pass.

    Args:
        decoder: whose weights it shares.
        layers: numbers of hidden states, as `Decoder.hidden_states` counts them: 0 for the embeddings, i for what
            layer i leaves, `num_layers` for what the head reads.

    Raises:
        ValueError: no layer, or one that the decoder doesn't have.
    """

    def __init__(self, decoder: Decoder, layers: Sequence[int]) -> None:
        check_layers(decoder.config, layers)
        super().__init__(decoder.config, decoder.weights, decoder.dtype)
        self._layers = tuple(layers)
        self.recorded = torch.zeros(1, 0, self.width, dtype=decoder.dtype)

    @property
    def width(self) -> int:
        """Numbers in one token's features."""
        return len(self._layers) * self.config.hidden_size

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As `Decoder.forward`; `recorded` then is `[batch, tokens, width]`, the layers side by side as given."""
        wanted: dict[int, Tensor] = {}
        for number, hidden in enumerate(self.hidden_states(tokens, positions, attend)):
            if number in self._layers:
                wanted[number] = hidden
        self.recorded = torch.cat([wanted[layer] for layer in self._layers], -1)
        return self.head(hidden)


def check_layers(config: ModelConfig, layers: Sequence[int]) -> None:
    """Refuse numbers of hidden states that a model doesn't have.

    Raises:
        ValueError: no layer, or one outside 0 to `num_layers`.
    """
    if not layers:
        raise ValueError("layers must name at least one hidden state, got none")
    for layer in layers:
        check_count("layers", layer, 0)
        if layer > config.num_layers:
            raise ValueError(f"layers must lie between 0 and the {config.num_layers} of the model, got {layer}")


class FeatureSource(Protocol):
    """A target whose hidden states a drafter may read."""

    def features(self) -> Tensor:
        """Row i belongs to the token i that the target remembers, `[length, width]`."""


@dataclass(frozen=True)
class ScriptedFeatures(Spec):
    """A `FeatureSource` whose answers come from the test's own function.

    Args:
        features: returns `[rows, width]`.
    """

    features: Callable[[], Tensor]

    def build(self) -> FeatureSource:
        """An object that calls back."""
        return _Scripted(self)


class _Scripted:
    """Shows a script's function as the method of the protocol."""

    def __init__(self, script: ScriptedFeatures) -> None:
        self._script = script

    def features(self) -> Tensor:
        """Calls the test's function."""
        return self._script.features()
