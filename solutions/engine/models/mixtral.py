"""Mixtral: Llama whose MLP is a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checks import check_count
from labkit.config import ModelConfig
from labkit.decoder import weight_shapes

from .blocks import Decoder, GatedMLP, Weights, fitting, grouped_layers, grouped_shape
from .experts import Experts, Route
from .windows import Windows


class Mixtral(Decoder):
    """Grouped heads, and experts of which each token gets the `top_k` most probable.

    Args:
        config: sizes of the model; `intermediate_size` is that of one expert.
        weights: tensors under their Hugging Face names.
        dtype: as in `Llama`.
        num_experts: in each layer.
        top_k: experts of a token.
        windows: as in `Llama`.

    Raises:
        ValueError: weights, windows or counts that don't fit.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype = torch.float32, *, num_experts: int,
        top_k: int, windows: Windows = (),
    ) -> None:  # fmt: skip
        check_count("num_experts", num_experts, 1)
        check_count("top_k", top_k, 1)
        if top_k > num_experts:
            raise ValueError(f"top_k must be at most the {num_experts} experts, got {top_k}")
        given = fitting("mixtral", _shapes(config, num_experts), weights, dtype)
        layers = grouped_layers(config, given, windows, lambda name: _mixture(given, name, num_experts, top_k))
        super().__init__(config, given, layers, grouped_shape(config))


def _mixture(weights: Weights, name: str, num_experts: int, top_k: int) -> Experts:
    """The experts of the layer `name`."""
    moe = f"{name}.block_sparse_moe"
    names = [f"{moe}.experts.{number}" for number in range(num_experts)]
    experts = [GatedMLP(weights, f"{one}.w1", f"{one}.w3", f"{one}.w2") for one in names]
    return Experts(_router(weights[f"{moe}.gate.weight"], top_k), experts)


def _router(gate: Tensor, top_k: int) -> Route:
    """The most probable experts; their probabilities, made to sum to 1, are the shares."""

    def route(hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(hidden, gate)
        probs = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1)
        shares, experts = probs.topk(top_k, dim=-1)
        return experts, shares / shares.sum(dim=-1, keepdim=True)

    return route


def _shapes(config: ModelConfig, num_experts: int) -> dict[str, tuple[int, ...]]:
    """The shape of every weight."""
    hidden, width = config.hidden_size, config.intermediate_size
    shapes = {name: shape for name, shape in weight_shapes(config).items() if ".mlp." not in name}
    for index in range(config.num_layers):
        moe = f"model.layers.{index}.block_sparse_moe"
        shapes[f"{moe}.gate.weight"] = (num_experts, hidden)
        for number in range(num_experts):
            for part, shape in (("w1", (width, hidden)), ("w2", (hidden, width)), ("w3", (width, hidden))):
                shapes[f"{moe}.experts.{number}.{part}.weight"] = shape
    return shapes
