"""Gives each layer its own columns of fc, and writes the norms out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Attend
from labkit.decoder_layer import decoder_layer
from labkit.draft_head import CachedHead


def fused_features(weights: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """Bring the hidden states of several layers to one width.

    Args:
        weights: "fc.weight" `[hidden, layers * hidden]`.
        features: `[..., layers * hidden]`, the layers side by side from low to high.

    Returns:
        `[..., hidden]`

    Source: Li et al. 2025 (2503.01840), section 3.
    """
    # BEGIN SOLUTION
    width = weights["fc.weight"].shape[0]
    parts = zip(features.split(width, -1), weights["fc.weight"].split(width, 1), strict=True)
    return torch.stack([part @ columns.T for part, columns in parts]).sum(0)
    # END SOLUTION


def eagle3_features(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
) -> Tensor:
    """The head's own state after each token.

    Attention reads embedding and state side by side, each normed for itself, the embedding first. The stream that it
    and the MLP add to is the state alone, not normed. What comes out isn't meant to be any feature of the target: it
    only has to predict the next token, and to be of use as the state of the row behind.

    Args:
        config: shape of the layer.
        weights: "embed_tokens.weight" `[vocab_size, hidden]`, "layer.input_layernorm.weight" for the embedding,
            "layer.hidden_norm.weight" for the state, and the rest of `decoder_layer`'s, queries, keys and values
            reading `2 * hidden` numbers.
        hidden: `[batch, rows, hidden]`; row i is `fused_features` of token i, or, for a draft, what this function gave
            for the row before.
        tokens: row i the token i + 1, int64 `[batch, rows]`.
        positions: `[batch, rows]`, or `[rows]` for all alike.
        attend: attention of the layer.

    Returns:
        `[batch, rows, hidden]`; behind `norm` and output matrix row i gives the logits of token i + 2.

    Source: Li et al. 2025 (2503.01840), section 3; module section 3.4.
    """
    # BEGIN SOLUTION
    joined = hidden.new_empty(*hidden.shape[:-1], 2 * hidden.shape[-1])
    sources = ((weights["embed_tokens.weight"][tokens], "input_layernorm"), (hidden, "hidden_norm"))
    for (source, name), place in zip(sources, joined.chunk(2, -1), strict=True):
        place.copy_(source * (source.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt())
        place.mul_(weights[f"layer.{name}.weight"])
    return decoder_layer(config, weights, hidden, positions, attend, joined)
    # END SOLUTION


class Eagle3Head(CachedHead):
    """The head at work on one text: reads the hidden states of several layers, and has a norm and an output matrix."""

    def read(self, features: Tensor) -> Tensor:
        """The target's features, fused."""
        return fused_features(self.weights, features)

    def step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of `eagle3_features`."""
        return eagle3_features(self.config, self.weights, hidden, tokens, positions, attend)
