"""Task 16: the module that a model was pretrained with to predict one token more, as its drafter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Attend
from labkit.decoder_layer import decoder_layer, rms_norm
from labkit.draft_head import CachedHead


def mtp_features(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
) -> Tensor:
    """The hidden state from which the token after next is read.

    State and embedding are of different size, so each is normed for itself before they are joined, the state first;
    `eh_proj` brings them back to one width, and a decoder layer follows.

    Args:
        config: shape of the layer.
        weights: "embed_tokens.weight" `[vocab_size, hidden]` (the model's), "hnorm.weight" for the state,
            "enorm.weight" for the embedding, "eh_proj.weight" `[hidden, 2 * hidden]`, and those of `decoder_layer`.
        hidden: row i of token i, `[batch, rows, hidden]`: the model's last hidden state, or this function's own.
        tokens: row i the token i + 1, int64 `[batch, rows]`.
        positions: `[batch, rows]`, or `[rows]` for all alike.
        attend: attention of the layer.

    Returns:
        `[batch, rows, hidden]`; behind `norm` and the model's output matrix row i gives the logits of token i + 2.

    Source: DeepSeek-V3 technical report (2412.19437), section 2.2; module section 3.4.
    """
    # BEGIN SOLUTION
    embedded = torch.nn.functional.embedding(tokens, weights["embed_tokens.weight"])
    joined = torch.cat(
        [
            rms_norm(hidden, weights["hnorm.weight"], config.norm_eps),
            rms_norm(embedded, weights["enorm.weight"], config.norm_eps),
        ],
        -1,
    )
    projected = torch.nn.functional.linear(joined, weights["eh_proj.weight"])
    return decoder_layer(config, weights, projected, positions, attend)
    # END SOLUTION


class MtpHead(CachedHead):
    """The module at work on one text: reads the model's last hidden state, and has a norm of its own."""

    def step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass of `mtp_features`."""
        return mtp_features(self.config, self.weights, hidden, tokens, positions, attend)
