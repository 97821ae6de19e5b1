"""One layer of a decoder as a function of its weights, for heads that are trained beside a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Attend, rope_frequencies, rotate


def decoder_layer(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    positions: Tensor,
    attend: Attend,
    attention_input: Tensor | None = None,
) -> Tensor:
    """Run one Llama layer: attention and gated MLP, each normed before and added to the stream.

    Args:
        config: shape of the layer; `num_layers` and `vocab_size` don't matter.
        weights: under the names of a Hugging Face layer behind "layer.", e.g. "layer.self_attn.q_proj.weight".
        hidden: the stream, `[batch, tokens, hidden]`.
        positions: `[batch, tokens]`, or `[tokens]` for all rows alike.
        attend: attention; called once, as layer 0.
        attention_input: what queries, keys and values are made of, `[batch, tokens, any]`, normed already; None means
            the normed stream.

    Returns:
        The stream behind the layer, `[batch, tokens, hidden]`. Gradients flow to weights and inputs.
    """
    positions = positions.expand(hidden.shape[:2])
    angles = positions[:, None, :, None].to(torch.float32) * rope_frequencies(config).to(hidden.device)
    cos, sin = angles.cos(), angles.sin()
    if attention_input is None:
        attention_input = rms_norm(hidden, weights["layer.input_layernorm.weight"], config.norm_eps)
    q, k, v = (
        _linear(weights, f"self_attn.{name}", attention_input).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    read = attend(0, rotate(q, cos, sin), rotate(k, cos, sin), v, positions)
    hidden = hidden + _linear(weights, "self_attn.o_proj", read.transpose(1, 2).flatten(2))
    normed = rms_norm(hidden, weights["layer.post_attention_layernorm.weight"], config.norm_eps)
    gated = F.silu(_linear(weights, "mlp.gate_proj", normed)) * _linear(weights, "mlp.up_proj", normed)
    return hidden + _linear(weights, "mlp.down_proj", gated)


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root of the mean square, in at least float32, then scale: `[..., hidden]`."""
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(inputs.dtype) * weight


def _linear(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    return F.linear(inputs, weights[f"layer.{name}.weight"], weights.get(f"layer.{name}.bias"))
