"""The decoder against transformers' own Llama and Qwen2, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from labkit.config import ModelConfig, RopeScaling
from labkit.decoder import Decoder, full_attention, random_weights, rope_frequencies, weight_shapes

MODELS = {
    "llama": ModelConfig.tiny(),
    "llama-mha": ModelConfig.tiny(hidden_size=25, num_heads=5, num_kv_heads=5, tie_embeddings=False),
    "llama-mqa": ModelConfig.tiny(num_heads=4, num_kv_heads=1, head_dim=10),
    "llama-odd-pairs": ModelConfig.tiny(hidden_size=36, num_heads=9, num_kv_heads=3, head_dim=6, rope_theta=100_000.0),
    "llama-biases": ModelConfig.tiny(attention_bias=True, norm_eps=1e-2),
    "llama3-scaling": ModelConfig.tiny(head_dim=32, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
    "linear-scaling": ModelConfig.tiny(rope_scaling=RopeScaling("linear", 4.0)),
    "qwen2": ModelConfig.tiny(architecture="qwen2"),
    "qwen2-untied": ModelConfig.tiny(architecture="qwen2", tie_embeddings=False, num_heads=8, rope_theta=1e6),
}
CLASSES = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
           "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)}


def reference(config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> torch.nn.Module:
    config_class, model_class = CLASSES[config.architecture]
    # Written-out attention, but its softmax is float32 in every type, which an oracle in float64 must not have.
    attention = "sdpa" if dtype == torch.float64 else "eager"
    model = model_class(config_class(**config.to_huggingface(), attn_implementation=attention)).to(dtype).eval()
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    if dtype == torch.float64:
        # The same holds for its norms.
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = exact_norm.__get__(module)  # type: ignore[method-assign]
    return model


def exact_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.variance_epsilon)


def error(given: Tensor, exact: Tensor) -> float:
    assert given.shape == exact.shape
    return float((given.double() - exact).abs().max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_as_close_to_the_exact_ones_as_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    config = MODELS[name]
    weights = random_weights(config, seed=1, dtype=dtype)
    tokens = torch.randint(config.vocab_size, (3, 67), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        exact = reference(config, {key: value.double() for key, value in weights.items()}, torch.float64)(tokens).logits
        theirs = reference(config, weights, dtype)(tokens).logits
    ours = Decoder(config, weights, dtype)(tokens, torch.arange(67), full_attention)
    assert ours.dtype == dtype and bool(exact.abs().max() > 1)
    assert error(ours, exact) <= 2 * error(theirs, exact) + 8 * torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_in_float64_only_the_float32_angles_of_rope_are_rounded(name: str) -> None:
    config = MODELS[name]
    weights = random_weights(config, seed=3, dtype=torch.float64)
    tokens = torch.randint(config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        exact = reference(config, weights, torch.float64)(tokens).logits
    ours = Decoder(config, weights, torch.float64)(tokens, torch.arange(19), full_attention)
    # The reference takes the same float32 cosines and sines, so nothing but float64 rounding is left.
    assert error(ours, exact) <= 200 * torch.finfo(torch.float64).eps * float(exact.abs().max())


def test_norms_of_large_half_precision_activations_do_not_overflow() -> None:
    config = ModelConfig.tiny()
    weights = random_weights(config, 7, torch.float16)
    weights["model.embed_tokens.weight"] *= 1000  # squares of these are beyond float16
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        exact = reference(config, {key: value.double() for key, value in weights.items()}, torch.float64)(tokens).logits
        theirs = reference(config, weights, torch.float16)(tokens).logits
    ours = Decoder(config, weights, torch.float16)(tokens, torch.arange(20), full_attention)
    bound = 2 * error(theirs, exact) + 8 * torch.finfo(torch.float16).eps * float(exact.abs().max())
    assert error(ours, exact) <= bound


def test_positions_far_out_are_told_apart_in_bfloat16() -> None:
    config = ModelConfig.tiny(max_context=8192)
    decoder = Decoder(config, random_weights(config, 0), torch.bfloat16)
    cos, sin = decoder.rotation(torch.tensor([[4095]]))
    angles = 4095 * 10_000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert error(cos[0, 0, 0], angles.cos()) < 1e-3 and error(sin[0, 0, 0], angles.sin()) < 1e-3


def test_attention_sees_rotated_keys_in_layer_order_and_the_given_positions() -> None:
    config = ModelConfig.tiny()
    weights = random_weights(config, 0)
    decoder = Decoder(config, weights)
    calls = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        calls.append((layer, q.shape, k.shape, v.shape, positions.tolist(), k.clone()))
        return full_attention(layer, q, k, v, torch.arange(q.shape[2]).expand_as(positions))

    tokens = torch.tensor([[5, 5], [7, 7]])
    decoder(tokens, torch.tensor([[3, 4], [0, 9]]), attend)
    assert [call[0] for call in calls] == [0, 1, 2, 3]
    assert calls[0][1:4] == ((2, 6, 2, 8), (2, 2, 2, 8), (2, 2, 2, 8))
    assert calls[0][4] == [[3, 4], [0, 9]]
    # A token at position 0 is not rotated; the same token further on is turned, pair by pair, and keeps its length.
    hidden = weights["model.embed_tokens.weight"][7]
    hidden = hidden * torch.rsqrt(hidden.square().mean() + 1e-5) * weights["model.layers.0.input_layernorm.weight"]
    plain = (weights["model.layers.0.self_attn.k_proj.weight"] @ hidden).view(2, 8)
    keys = calls[0][5][1]
    assert error(keys[:, 0], plain.double()) < 1e-5
    frequencies = 10_000.0 ** -(torch.arange(4) / 4)
    turned = torch.complex(plain[:, :4], plain[:, 4:]) * torch.exp(1j * 9 * frequencies)
    assert error(keys[:, 1], torch.cat((turned.real, turned.imag), -1).double()) < 1e-5


def test_llama3_scaling_keeps_fast_turns_and_divides_slow_ones() -> None:
    plain = ModelConfig.tiny(head_dim=64)
    scaled = ModelConfig.tiny(head_dim=64, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 512))
    ratio = rope_frequencies(plain) / rope_frequencies(scaled)
    turns = 512 * rope_frequencies(plain) / (2 * math.pi)
    assert torch.equal(ratio[turns > 4], torch.ones_like(ratio[turns > 4])) and bool((turns > 4).any())
    assert torch.equal(ratio[turns < 1], torch.full_like(ratio[turns < 1], 8.0)) and bool((turns < 1).any())
    middle = ratio[(turns > 1) & (turns < 4)]
    assert len(middle) and bool(((middle > 1) & (middle < 8)).all())


def test_random_weights_depend_on_the_seed_alone_and_make_every_part_matter() -> None:
    config = ModelConfig.tiny(architecture="qwen2", tie_embeddings=False)
    weights = random_weights(config, 5)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == weight_shapes(config)
    assert all(torch.equal(weights[name], other) for name, other in random_weights(config, 5).items())
    assert not torch.equal(weights["lm_head.weight"], random_weights(config, 6)["lm_head.weight"])
    tokens, positions = torch.arange(12)[None], torch.arange(12)
    before = Decoder(config, weights)(tokens, positions, full_attention)
    assert float(before.std()) > 0.5
    for name, weight in weights.items():
        after = Decoder(config, weights | {name: torch.ones_like(weight)})(tokens, positions, full_attention)
        if not name.endswith("k_proj.bias"):  # alike for all keys before rotation, it moves the softmax least
            assert float((after - before).abs().max()) > 0.05, f"{name} hardly matters"


@pytest.mark.parametrize(("tokens", "positions", "message"), [
    (torch.tensor([[1, 61]]), torch.arange(2), r"token ids must lie in 0..60, got 61"),
    (torch.tensor([[-1, 2]]), torch.arange(2), r"token ids must lie in 0..60, got -1"),
    (torch.tensor([[1, 2]]), torch.tensor([127, 128]), r"positions must lie in 0..127.*got 128"),
    (torch.tensor([[1, 2]]), torch.tensor([-1, 0]), r"positions must lie in 0..127.*got -1"),
    (torch.tensor([1, 2]), torch.arange(2), r"tokens must have the shape \[batch, tokens\]"),
    (torch.zeros(1, 0, dtype=torch.int64), torch.arange(0), "not be empty"),
    (torch.tensor([[1, 2]]), torch.arange(3), r"positions must have the shape \(1, 2\)"),
    (torch.tensor([[1.0, 2.0]]), torch.arange(2), "tokens must be an int64 tensor, got torch.float32"),
    (torch.tensor([[1, 2]]), torch.arange(2, dtype=torch.int32), "positions must be an int64 tensor, got torch.int32"),
    ([[1, 2]], torch.arange(2), "tokens must be an int64 tensor, got list"),
    (torch.tensor([[1, 2]]), torch.arange(2, device="meta"), "positions are on meta, the model is on cpu"),
])
def test_bad_input_is_refused_before_any_layer_runs(tokens: Any, positions: Any, message: str) -> None:
    config = ModelConfig.tiny()
    decoder = Decoder(config, random_weights(config, 0))

    def attend(*_: Any) -> Tensor:
        raise AssertionError("attention was called")

    with pytest.raises(ValueError, match=message):
        decoder(tokens, positions, attend)


def test_attention_that_returns_another_shape_is_named() -> None:
    config = ModelConfig.tiny()
    decoder = Decoder(config, random_weights(config, 0))
    with pytest.raises(ValueError, match=r"attention of layer 0 returned shape \(1, 2, 3, 8\)"):
        decoder(torch.tensor([[1, 2, 3]]), torch.arange(3), lambda layer, q, k, v, positions: v)


def test_weights_that_do_not_fit_are_named() -> None:
    config = ModelConfig.tiny()
    weights = random_weights(config, 0)
    Decoder(config, weights)
    without = {name: weight for name, weight in weights.items() if "layers.3" not in name}
    with pytest.raises(ValueError, match=r"lacks the weights model.layers.3.input_layernorm.weight,.* and 6 more"):
        Decoder(config, without)
    with pytest.raises(ValueError, match=r"does not know the weights lm_head.weight"):
        Decoder(config, weights | {"lm_head.weight": torch.zeros(61, 24)})
    with pytest.raises(ValueError, match=r"model.norm.weight must have the shape \(24,\), got \(23,\)"):
        Decoder(config, weights | {"model.norm.weight": torch.zeros(23)})
    with pytest.raises(ValueError, match=r"model.norm.weight must be floating point, got torch.int8"):
        Decoder(config, weights | {"model.norm.weight": torch.zeros(24, dtype=torch.int8)})
    with pytest.raises(ValueError, match="dtype must be one of"):
        Decoder(config, weights, torch.int32)


def test_full_attention_refuses_what_needs_a_cache() -> None:
    q, k = torch.zeros(1, 6, 2, 8), torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="2 queries and 5 keys"):
        full_attention(0, q, k, k, torch.arange(2)[None])
    with pytest.raises(ValueError, match=r"positions 0..1"):
        full_attention(0, q, k[:, :, :2], k[:, :, :2], torch.tensor([[3, 4]]))
