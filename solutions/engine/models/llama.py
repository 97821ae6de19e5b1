"""Llama over the tokens of many requests laid end to end; Qwen2 has biases besides, Mistral windows."""

from __future__ import annotations

import torch

from labkit.config import ModelConfig
from labkit.decoder import weight_shapes

from .blocks import Decoder, Weights, fitting, gated_mlp, grouped_layers, grouped_shape
from .windows import Windows


class Llama(Decoder):
    """Grouped heads and a gated MLP.

    Args:
        config: sizes of the model.
        weights: tensors under their Hugging Face names.
        dtype: of weights and activations; norms and RoPE use at least float32.
        windows: one for each layer; empty if every layer sees everything.

    Raises:
        ValueError: weights or windows that don't fit the configuration.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype = torch.float32, *, windows: Windows = ()
    ) -> None:
        given = fitting(config.architecture, weight_shapes(config), weights, dtype)
        layers = grouped_layers(config, given, windows, lambda name: gated_mlp(given, f"{name}.mlp"))
        super().__init__(config, given, layers, grouped_shape(config))
