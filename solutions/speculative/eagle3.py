"""Task 15: EAGLE-3's head: features of several layers, fused, and its own outputs in place of the target's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Attend
from labkit.decoder_layer import decoder_layer, rms_norm
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
    return torch.nn.functional.linear(features, weights["fc.weight"])
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
    embedded = torch.nn.functional.embedding(tokens, weights["embed_tokens.weight"])
    embedded = rms_norm(embedded, weights["layer.input_layernorm.weight"], config.norm_eps)
    state = rms_norm(hidden, weights["layer.hidden_norm.weight"], config.norm_eps)
    return decoder_layer(config, weights, hidden, positions, attend, torch.cat([embedded, state], -1))
    # END SOLUTION


class Eagle3Head(CachedHead):
    """The head at work on one text: reads the hidden states of several layers, and has a norm and an output matrix."""

    def read(self, features: Tensor) -> Tensor:
        """The target's features, fused."""
        return fused_features(self.weights, features)

    def step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of `eagle3_features`."""
        return eagle3_features(self.config, self.weights, hidden, tokens, positions, attend)
