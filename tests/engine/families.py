"""Tiny models of every family with random weights, as transformers makes and stores them."""

from __future__ import annotations

from typing import Any

import torch

VOCAB_SIZE = 97
NUM_LAYERS = 3
WINDOW = 7
"""Less than the texts of the tests, and no multiple of a block."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 7,
    "moe_intermediate_size": 20, "first_k_dense_replace": 1, "num_experts_per_tok": 3, "n_routed_experts": 8,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.25,
    "mscale": 0.7, "mscale_all_dim": 1.2, "rope_theta": 50.0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 8}),
    "llama, tied and with biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows from the third layer on": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3, windows in every other layer": (
        "Qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _ALTERNATING}
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral, windows": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": WINDOW}),
    "deepseek v2, no experts": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": NUM_LAYERS}),
    "deepseek v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek v2, groups": (
        "DeepseekV2",
        {**_LATENT, "q_lora_rank": 10, "n_shared_experts": 1, "topk_method": "group_limited_greedy", "n_group": 4,
         "topk_group": 2, "rope_parameters": _YARN, "attention_bias": True},
    ),
    "deepseek v3": (
        "DeepseekV3",
        {**_LATENT, "q_lora_rank": 10, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "rope_parameters": _YARN,
         "rms_norm_eps": 1e-3},
    ),
}  # fmt: skip
"""Name in transformers, and what differs from `_SIZES`."""


def oracle_of(family: str, seed: int = 1) -> Any:
    """transformers' own model, in float32, with weights that make errors show.

    Attention is peaked, layers outweigh the embedding, norms differ from one, and biases and corrections from zero.
    """
    import transformers

    name, entries = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **entries})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if "experts" in str(model):
        model.set_experts_implementation("eager")  # the others know no float64
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        if "norm" in key:
            values = 1 + 0.3 * values
        elif tensor.dim() == 1:
            values = 0.3 * values
        else:
            values = 1.5 * values / tensor.shape[-1] ** 0.5
        tensor.copy_(values)
    return model
