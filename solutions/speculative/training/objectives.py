"""Stage 3a: for each head where its training starts, and how far it is from what the target says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention
from labkit.decoder_layer import decoder_layer, rms_norm

from ..eagle import eagle_features
from ..eagle3 import eagle3_features, fused_features
from ..medusa import medusa_logits
from ..mtp import mtp_features
from .rollout import rollout

Weights = Mapping[str, Tensor]
MEDUSA_HEADS = 3
EMBEDDING_SIZE = 4.0
"""Brings an embedding of SmolLM2 nearer to the size of a feature: root mean squares of 0.13 and 2.3."""
STREAM_SIZE = 12.0
"""Root mean square of the stream in the last layers of SmolLM2, 22, by that of a feature; training corrects it."""


@dataclass(frozen=True)
class Batch:
    """Texts of one training step.

    Args:
        tokens: int64 `[texts, tokens]`; anything behind the end of a text.
        hidden: what the target thought, float32 `[texts, tokens, layers, hidden]`.
        lengths: tokens of each text.
    """

    tokens: Tensor
    hidden: Tensor
    lengths: Tensor

    @property
    def final(self) -> Tensor:
        """What the target's output matrix reads, `[texts, tokens, hidden]`."""
        return self.hidden[:, :, -1]


@dataclass(frozen=True)
class Guesses:
    """What a head says at one place of its draft.

    Args:
        hidden: what the output matrix reads, `[texts, rows, hidden]`.
        first: rows before it mean nothing.
        ahead: row i is judged by the target's feature of token i + ahead.
        features: what stands for that feature itself, if the head is to come near it.
    """

    hidden: Tensor
    first: int
    ahead: int
    features: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """How one kind of head is trained.

    Args:
        config: shape of its layers.
        start: the weights that training starts from, those that are stored.
        guess: the head at work on a batch: its guesses place by place.
    """

    config: ModelConfig
    start: dict[str, Tensor]
    guess: Callable[[Weights, Batch], list[Guesses]]


def objective(name: str, decoder: Decoder, width: int, steps: int, seed: int) -> Objective:
    """The objective of a head.

    Args:
        name: "draft", "medusa", "eagle", "eagle3" or "mtp".
        decoder: the target, parts of which a head begins with.
        width: of the MLP in the head's layers.
        steps: drafts that a head is trained to make in a row from one feature.
        seed: of the weights that have no model.

    Raises:
        ValueError: another name.
    """
    if name not in _MAKERS:
        raise ValueError(f"head must be one of {', '.join(_MAKERS)}, got {name!r}")
    config = replace(decoder.config, intermediate_size=min(width, decoder.config.intermediate_size))
    generator = torch.Generator().manual_seed(seed)
    return _MAKERS[name](decoder, config, steps, generator)


def _draft(decoder: Decoder, config: ModelConfig, steps: int, generator: torch.Generator) -> Objective:
    """A model of two layers, begun with the target's first and last; it needs no features."""
    config = replace(config, num_layers=2)
    start = {"model.norm.weight": decoder.weights["model.norm.weight"].clone()}
    for place, layer in enumerate((0, decoder.config.num_layers - 1)):
        own = _layer(decoder, config, layer).items()
        start |= {f"model.layers.{place}.{name.removeprefix('layer.')}": weight for name, weight in own}

    def guess(weights: Weights, batch: Batch) -> list[Guesses]:
        hidden = F.embedding(batch.tokens, weights["embed_tokens.weight"])
        positions = torch.arange(batch.tokens.shape[1])
        for place in range(2):
            prefix = f"model.layers.{place}."
            own = {f"layer.{name.removeprefix(prefix)}": w for name, w in weights.items() if name.startswith(prefix)}
            hidden = decoder_layer(config, own, hidden, positions, full_attention)
        return [Guesses(rms_norm(hidden, weights["model.norm.weight"], config.norm_eps), first=0, ahead=0)]

    return Objective(config, start, guess)


def _medusa(decoder: Decoder, config: ModelConfig, steps: int, generator: torch.Generator) -> Objective:
    """Residual blocks that begin as nothing, so that each head begins as the target's own."""
    width = config.hidden_size
    start = {}
    for head in range(MEDUSA_HEADS):
        start[f"heads.{head}.linear.weight"] = torch.zeros(width, width)
        start[f"heads.{head}.linear.bias"] = torch.zeros(width)

    def guess(weights: Weights, batch: Batch) -> list[Guesses]:
        # An output matrix of one is what the heads' shared one then is applied to.
        bare = {**weights, "lm_head.weight": torch.eye(width)}
        return [Guesses(medusa_logits(bare, batch.final, head), 0, head + 1) for head in range(MEDUSA_HEADS)]

    return Objective(config, start, guess)


def _eagle(decoder: Decoder, config: ModelConfig, steps: int, generator: torch.Generator) -> Objective:
    handed_on, scattered = _joint(1.0, config, generator).chunk(2, 1)
    start = {
        "fc.weight": torch.cat([EMBEDDING_SIZE * scattered, handed_on], 1), "fc.bias": torch.zeros(config.hidden_size)
    }  # fmt: skip
    layer = _layer(decoder, config, config.num_layers - 1)
    for name in ("layer.self_attn.o_proj.weight", "layer.mlp.down_proj.weight"):
        # The layer wrote into a stream that a norm then brought down to the size of a feature; here is no norm.
        layer[name] /= STREAM_SIZE
    start |= layer

    def guess(weights: Weights, batch: Batch) -> list[Guesses]:
        step = partial(eagle_features, config, weights)
        given = rollout(step, batch.final[:, :-1], batch.tokens[:, 1:], steps)
        return [Guesses(hidden, place, 1, features=hidden) for place, hidden in enumerate(given)]

    return Objective(config, start, guess)


def _eagle3(decoder: Decoder, config: ModelConfig, steps: int, generator: torch.Generator) -> Objective:
    width = config.hidden_size
    layer = _layer(decoder, config, config.num_layers - 1)
    for name in ("q_proj", "k_proj", "v_proj"):
        own = layer[f"layer.self_attn.{name}.weight"]
        # The embedding comes first and begins with nothing to say; the state is read as the target's layer read it.
        layer[f"layer.self_attn.{name}.weight"] = torch.cat([0.02 * _random(own.shape, generator), own], 1)
    layer["layer.hidden_norm.weight"] = layer["layer.input_layernorm.weight"].clone()
    high = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)
    start = {"fc.weight": high + 0.02 * _random(high.shape, generator), **layer}
    start["norm.weight"] = decoder.weights["model.norm.weight"].clone()

    def guess(weights: Weights, batch: Batch) -> list[Guesses]:
        features = batch.hidden[:, :-1, :-1].flatten(2)
        step = partial(eagle3_features, config, weights)
        given = rollout(step, fused_features(weights, features), batch.tokens[:, 1:], steps)
        return [
            Guesses(rms_norm(hidden, weights["norm.weight"], config.norm_eps), place, 1)
            for place, hidden in enumerate(given)
        ]

    return Objective(config, start, guess)


def _mtp(decoder: Decoder, config: ModelConfig, steps: int, generator: torch.Generator) -> Objective:
    ones = torch.ones(config.hidden_size)
    start = {
        "hnorm.weight": ones,
        "enorm.weight": ones.clone(),
        "eh_proj.weight": _joint(STREAM_SIZE, config, generator),
    }
    start["norm.weight"] = decoder.weights["model.norm.weight"].clone()
    start |= _layer(decoder, config, config.num_layers - 1)

    def guess(weights: Weights, batch: Batch) -> list[Guesses]:
        step = partial(mtp_features, config, weights)
        given = rollout(step, batch.final[:, :-1], batch.tokens[:, 1:], steps)
        return [
            Guesses(rms_norm(hidden, weights["norm.weight"], config.norm_eps), place, 1)
            for place, hidden in enumerate(given)
        ]

    return Objective(config, start, guess)


_MAKERS: dict[str, Callable[[Decoder, ModelConfig, int, torch.Generator], Objective]] = {
    "eagle3": _eagle3, "eagle": _eagle, "mtp": _mtp, "draft": _draft, "medusa": _medusa,
}  # fmt: skip
HEADS = tuple(_MAKERS)


def _layer(decoder: Decoder, config: ModelConfig, layer: int) -> dict[str, Tensor]:
    """A layer of the target, of its MLP only the units with the largest weights."""
    prefix = f"model.layers.{layer}."
    own = {name.removeprefix(prefix): w for name, w in decoder.weights.items() if name.startswith(prefix)}
    gate, up, down = (own[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    size = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    units = size.topk(config.intermediate_size).indices.sort().values
    own |= {
        "mlp.gate_proj.weight": gate[units],
        "mlp.up_proj.weight": up[units],
        "mlp.down_proj.weight": down[:, units],
    }
    return {f"layer.{name}": weight.clone() for name, weight in own.items()}


def _joint(size: float, config: ModelConfig, generator: torch.Generator) -> Tensor:
    """A matrix for two things side by side, `[hidden, 2 * hidden]`: one it hands on, times a number, one it scatters.

    The embedding must not be handed on as it is: the output matrix is made of embeddings, too, so the head would
    begin by being sure that the newest token comes again.
    """
    width = config.hidden_size
    scattered = _random(torch.Size((width, width)), generator) / width**0.5
    return size * torch.cat([torch.eye(width), scattered], 1)


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)
