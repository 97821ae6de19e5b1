"""Task 13a: EAGLE's head: from the target's features to the feature of the next token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Attend
from labkit.decoder_layer import decoder_layer
from labkit.draft_head import CachedHead


def eagle_features(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    features: Tensor,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
) -> Tensor:
    """Guess the feature of each token from the feature before it and the token itself.

    What the feature of token i leaves open is which token was drawn from it; so row i pairs it with token i + 1, and
    guesses the feature of token i + 1. The two stand side by side, the embedding first; `fc` brings them back to one
    width, and a decoder layer lets each row see those before it.

    Args:
        config: shape of the layer.
        weights: "embed_tokens.weight" `[vocab_size, hidden]` (the target's), "fc.weight" `[hidden, 2 * hidden]`,
            "fc.bias" `[hidden]` if it has one, and those of `decoder_layer`.
        features: row i of token i, `[batch, rows, hidden]`, as the target's head reads them.
        tokens: row i the token i + 1, int64 `[batch, rows]`.
        positions: `[batch, rows]`, or `[rows]` for all alike.
        attend: attention of the layer.

    Returns:
        `[batch, rows, hidden]`; row i stands for the feature of token i + 1, from which the target's own head would
        read token i + 2. Differentiable in weights and features.

    Source: Li et al. 2024 (2401.15077), section 4.1; module section 3.4.
    """
    # BEGIN SOLUTION
    embedded = torch.nn.functional.embedding(tokens, weights["embed_tokens.weight"])
    joined = torch.nn.functional.linear(
        torch.cat([embedded, features], -1), weights["fc.weight"], weights.get("fc.bias")
    )
    return decoder_layer(config, weights, joined, positions, attend)
    # END SOLUTION


class EagleHead(CachedHead):
    """The head at work on one text: reads the target's last hidden state, and has the target's own output matrix."""

    def step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of `eagle_features`."""
        return eagle_features(self.config, self.weights, hidden, tokens, positions, attend)
