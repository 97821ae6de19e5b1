"""DeepSeek-V2 and V3: latent attention, a gated MLP in the first layers, and experts in the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.checks import check_count
from labkit.config import ModelConfig
from labkit.latent_config import LatentConfig

from .blocks import Decoder, FeedForward, Layer, Weights, fitting, gated_mlp, same_kind
from .experts import Experts
from .group_routing import Routing, router
from .kv_shape import KVShape
from .latent_attention import LatentAttention
from .yarn import Yarn, yarn_frequencies


@dataclass(frozen=True)
class DeepseekConfig:
    """Sizes of the model.

    Args:
        core: what all families have; `head_dim` is that of RoPE, `intermediate_size` that of layers without experts.
        latent: sizes of the attention.
        q_lora_rank: width that queries are squeezed through; None if they are not.
        routing: of layers with experts.
        expert_size: width of an expert.
        num_shared: experts that every token has besides, computed as one.
        num_dense: first layers, which have no experts.
        yarn: how RoPE is stretched; None if it is not.

    Raises:
        ValueError: sizes that contradict each other.
    """

    core: ModelConfig
    latent: LatentConfig
    q_lora_rank: int | None
    routing: Routing
    expert_size: int
    num_shared: int
    num_dense: int
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        for name, least in (("q_lora_rank", 1), ("expert_size", 1), ("num_shared", 1), ("num_dense", 0)):
            if name != "q_lora_rank" or self.q_lora_rank is not None:
                check_count(name, getattr(self, name), least)
        for name in ("num_layers", "num_heads"):
            if getattr(self.core, name) != getattr(self.latent, name):
                raise ValueError(f"core and latent must agree on {name}, got {self.core} and {self.latent}")
        if self.core.head_dim != self.latent.qk_rope_head_dim:
            raise ValueError(f"head_dim must be qk_rope_head_dim, {self.latent.qk_rope_head_dim}")


class Deepseek(Decoder):
    """Latent attention, a gated MLP in the first layers and experts in the others.

    Args:
        config: sizes of the model.
        weights: tensors under their Hugging Face names.
        dtype: as in `Llama`.

    Raises:
        ValueError: weights that don't fit the configuration.
    """

    def __init__(self, config: DeepseekConfig, weights: Weights, dtype: torch.dtype = torch.float32) -> None:
        core, sizes = config.core, config.latent
        given = fitting("deepseek", weight_shapes(config), weights, dtype)
        # What decides between experts that are nearly equal is not rounded.
        exact = {name: weight for name, weight in weights.items() if name.endswith("e_score_correction_bias")}
        given = same_kind(given, {**given, **exact})
        score_gain = 1.0 if config.yarn is None else config.yarn.score_gain
        layers = []
        for index in range(core.num_layers):
            name = f"model.layers.{index}"
            attention = LatentAttention(sizes, given, f"{name}.self_attn", config.q_lora_rank, score_gain)
            layers.append(Layer(given, name, attention, _feed_forward(config, given, index), core.norm_eps))
        shape = KVShape(core.num_layers, 1, 1, sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        if config.yarn is None:
            super().__init__(core, given, layers, shape)
        else:
            frequencies = yarn_frequencies(config.yarn, core.rope_theta, core.head_dim)
            super().__init__(core, given, layers, shape, frequencies, config.yarn.rope_gain)


def _feed_forward(config: DeepseekConfig, weights: Weights, index: int) -> FeedForward:
    """What a layer computes token by token."""
    name = f"model.layers.{index}.mlp"
    if index < config.num_dense:
        return gated_mlp(weights, name)
    experts = [gated_mlp(weights, f"{name}.experts.{number}") for number in range(config.routing.num_experts)]
    route = router(config.routing, weights[f"{name}.gate.weight"], weights.get(f"{name}.gate.e_score_correction_bias"))
    return Experts(route, experts, gated_mlp(weights, f"{name}.shared_experts"))


def weight_shapes(config: DeepseekConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, under its Hugging Face name."""
    core, sizes, hidden = config.core, config.latent, config.core.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (core.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not core.tie_embeddings:
        shapes["lm_head.weight"] = (core.vocab_size, hidden)
    for index in range(core.num_layers):
        name = f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        q_width = sizes.num_heads * sizes.qk_head_dim
        biased = {"kv_a_proj_with_mqa": sizes.kv_lora_rank + sizes.qk_rope_head_dim, "o_proj": hidden}
        shapes[f"{name}.input_layernorm.weight"] = shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        if config.q_lora_rank is None:
            shapes[f"{attention}.q_proj.weight"] = (q_width, hidden)
        else:
            shapes[f"{attention}.q_a_proj.weight"] = (config.q_lora_rank, hidden)
            shapes[f"{attention}.q_a_layernorm.weight"] = (config.q_lora_rank,)
            shapes[f"{attention}.q_b_proj.weight"] = (q_width, config.q_lora_rank)
            biased["q_a_proj"] = config.q_lora_rank
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (biased["kv_a_proj_with_mqa"], hidden)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (sizes.kv_lora_rank,)
        kv_rows = sizes.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        shapes[f"{attention}.kv_b_proj.weight"] = (kv_rows, sizes.kv_lora_rank)
        shapes[f"{attention}.o_proj.weight"] = (hidden, sizes.num_heads * sizes.v_head_dim)
        if core.attention_bias:
            shapes |= {f"{attention}.{part}.bias": (width,) for part, width in biased.items()}
        if index < config.num_dense:
            shapes |= _mlp_shapes(mlp, hidden, core.intermediate_size)
            continue
        shapes[f"{mlp}.gate.weight"] = (config.routing.num_experts, hidden)
        if config.routing.sigmoid:
            shapes[f"{mlp}.gate.e_score_correction_bias"] = (config.routing.num_experts,)
        for number in range(config.routing.num_experts):
            shapes |= _mlp_shapes(f"{mlp}.experts.{number}", hidden, config.expert_size)
        shapes |= _mlp_shapes(f"{mlp}.shared_experts", hidden, config.num_shared * config.expert_size)
    return shapes


def _mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }
