"""Qwen3: Llama with a norm on each head of queries and keys."""

from __future__ import annotations

import torch

from labkit.config import ModelConfig
from labkit.decoder import weight_shapes

from .blocks import Decoder, Weights, fitting, gated_mlp, grouped_layers, grouped_shape
from .windows import Windows


class Qwen3(Decoder):
    """Grouped heads, normed before they are turned, and a gated MLP; arguments and errors as of `Llama`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype = torch.float32, *, windows: Windows = ()
    ) -> None:
        norms = {
            f"model.layers.{index}.self_attn.{part}_norm.weight": (config.head_dim,)
            for index in range(config.num_layers)
            for part in "qk"
        }
        given = fitting("qwen3", {**weight_shapes(config), **norms}, weights, dtype)
        layers = grouped_layers(config, given, windows, lambda name: gated_mlp(given, f"{name}.mlp"))
        super().__init__(config, given, layers, grouped_shape(config))
