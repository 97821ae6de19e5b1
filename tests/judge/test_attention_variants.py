"""The references of sliding-window and latent attention against transformers, which knows nothing of this project."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.attention_variants import latent_attention, windowed_attention
from grader.judge.numerics import largest_error

transformers = pytest.importorskip("transformers")

TOKENS = 11


def random(*shape: int, seed: int) -> Tensor:
    """Float64 numbers of both signs."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Recorder:
    """Stands for transformers' cache, and keeps what attention hands it: the latents and the rotated key parts."""

    def update(self, latents: Tensor, rope_keys: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Called once for each layer and pass."""
        self.latents, self.rope_keys = latents[:, 0], rope_keys[:, 0]
        return latents, rope_keys


@pytest.mark.parametrize("window", [1, 3, 4, 20])
def test_windowed_reference_equals_mistral(window: int) -> None:
    from transformers.models.mistral.modeling_mistral import MistralAttention, apply_rotary_pos_emb

    config = transformers.MistralConfig(
        hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=8, sliding_window=window,
        num_hidden_layers=1, vocab_size=61, intermediate_size=40, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(window)
    model = transformers.MistralModel(config).double().eval()
    attention = model.layers[0].self_attn
    assert isinstance(attention, MistralAttention)
    seen: dict[str, Any] = {}
    attention.register_forward_hook(
        lambda _, args, kwargs, output: seen.update(kwargs, output=output[0], hidden=kwargs["hidden_states"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(torch.arange(TOKENS).unsqueeze(0), use_cache=False)
        heads = [
            projection(seen["hidden"]).unflatten(2, (-1, 8)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        q, k = apply_rotary_pos_emb(heads[0], heads[1], *seen["position_embeddings"])
        result, unlimited = (
            attention.o_proj(windowed_attention(q, k, heads[2], limit).transpose(1, 2).flatten(2))
            for limit in (window, None)
        )
    assert largest_error(result, seen["output"]) < 1e-12
    assert (largest_error(unlimited, seen["output"]) < 1e-12) == (window >= TOKENS), "the window decides"


@pytest.mark.parametrize("version", ["2", "3"])
@pytest.mark.parametrize("q_lora_rank", [None, 10])
def test_latent_reference_equals_deepseek(version: str, q_lora_rank: int | None) -> None:
    config = getattr(transformers, f"DeepseekV{version}Config")(
        hidden_size=20, num_attention_heads=5, num_key_value_heads=5, num_hidden_layers=1, q_lora_rank=q_lora_rank,
        kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=7, attn_implementation="sdpa",
    )  # fmt: skip
    module = import_module(f"transformers.models.deepseek_v{version}.modeling_deepseek_v{version}")
    torch.manual_seed(1)
    attention = getattr(module, f"DeepseekV{version}Attention")(config, 0).double().eval()
    rope = getattr(module, f"DeepseekV{version}RotaryEmbedding")(config)
    hidden = random(2, TOKENS, 20, seed=2)
    position_embeddings = rope(hidden, torch.arange(TOKENS).expand(2, -1))
    recorder = Recorder()
    with torch.no_grad():
        whole = attention(
            hidden_states=hidden, attention_mask=None, position_embeddings=position_embeddings, cache=recorder
        )[0]
        if q_lora_rank is None:
            queries = attention.q_proj(hidden)
        else:
            queries = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
        q_nope, q_rope = queries.unflatten(2, (5, 10)).transpose(1, 2).split([6, 4], dim=3)
        q_rope = rotated(module, version, q_rope, position_embeddings)
        w_uk, w_uv = attention.kv_b_proj.weight.unflatten(0, (5, 13)).split([6, 7], dim=1)
        own = latent_attention(q_nope, q_rope, recorder.latents, recorder.rope_keys, w_uk, w_uv)
        result = attention.o_proj(own.transpose(1, 2).flatten(2))
    # transformers rotates in float32, and hands these numbers to both sides.
    assert largest_error(result, whole) < 1e-12


def rotated(module: Any, version: str, q_rope: Tensor, position_embeddings: Any) -> Tensor:
    """RoPE as the model does it."""
    if version == "2":
        return module.apply_rotary_emb(q_rope, q_rope, position_embeddings)[0]
    return module.apply_rotary_pos_emb_interleave(q_rope, q_rope, *position_embeddings)[0]


def test_a_query_without_keys_gives_zero() -> None:
    q, k = random(1, 2, 3, 4, seed=1), random(1, 1, 2, 4, seed=2)
    result = windowed_attention(q, k, k, 2)
    assert not result[:, :, 0].any() and result[:, :, 1:].all()
