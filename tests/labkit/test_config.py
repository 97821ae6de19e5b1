"""The config: what it refuses, and that every way in and out names the same model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from labkit.config import ModelConfig, RopeScaling

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                                   "num_kv_heads", "head_dim", "max_context"])
@pytest.mark.parametrize("value", [0, -4, 2.0, True, None, "8"])
def test_a_size_that_is_no_positive_whole_number_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ModelConfig.tiny(**{field: value})


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_heads": 6, "num_kv_heads": 4}, "multiple of num_kv_heads, got 6 and 4"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"architecture": "gpt2"}, "'gpt2' is not supported.*llama and qwen2"),
    ({"rope_theta": float("nan")}, "rope_theta"),
    ({"norm_eps": 0.0}, "norm_eps"),
    ({"architecture": "qwen2", "attention_bias": False}, "attention_bias must be True"),
    ({"hiden_size": 8}, "no field hiden_size"),
])
def test_a_model_that_cannot_exist_is_refused_with_a_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.tiny(**changes)


@pytest.mark.parametrize("arguments", [("yarn", 2.0), ("linear", 0.5), ("linear", float("inf")),
                                       ("llama3", 2.0, 4.0, 4.0), ("llama3", 2.0, 1.0, 4.0, 0)])
def test_rope_scaling_that_makes_no_sense_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="RoPE scaling"):
        RopeScaling(*arguments)


def test_the_sizes_of_the_tiny_model_differ_so_that_a_swap_shows() -> None:
    config = ModelConfig.tiny()
    sizes = [config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads,
             config.num_kv_heads, config.head_dim, config.num_query_groups, config.max_context,
             config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
    assert len(set(sizes)) == len(sizes)


def test_equal_configs_hash_alike_and_cannot_be_changed() -> None:
    config = ModelConfig.tiny(rope_scaling=LLAMA3)
    assert {config: 1}[ModelConfig.tiny(rope_scaling=LLAMA3)] == 1
    with pytest.raises(AttributeError):
        config.num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize("config", [
    ModelConfig.tiny(), ModelConfig.tiny(architecture="qwen2", tie_embeddings=False, rope_theta=1e6),
    ModelConfig.tiny(attention_bias=True, rope_scaling=LLAMA3),
    ModelConfig.tiny(rope_scaling=RopeScaling("linear", 4.0)),
], ids=["llama", "qwen2", "llama3-scaling", "linear-scaling"])
def test_transformers_reads_our_config_and_we_read_its(config: ModelConfig, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config.to_huggingface()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (theirs.num_key_value_heads, theirs.head_dim) == (config.num_kv_heads, config.head_dim)
    assert ModelConfig.from_huggingface(theirs.to_dict()) == config
    assert ModelConfig.from_huggingface(tmp_path) == config
    theirs.save_pretrained(tmp_path)
    assert ModelConfig.from_huggingface(tmp_path / "config.json") == config


def test_defaults_of_older_configs_are_filled_in() -> None:
    entries = ModelConfig.tiny(hidden_size=48, num_kv_heads=6).to_huggingface()
    for key in ("num_key_value_heads", "head_dim", "rope_theta", "hidden_act", "attention_bias"):
        del entries[key]
    assert ModelConfig.from_huggingface(entries) == ModelConfig.tiny(hidden_size=48, num_kv_heads=6)


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "mamba"}, "'mamba' is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"bits": 4}}, "quantized folders"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "no entry 'low_freq_factor'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "no entry 'factor'"),
    ({"rope_parameters": {"rope_theta": 50.0}, "rope_scaling": {"type": "linear", "factor": 4.0}}, "contradict"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 50.0}}}, "differ from layer to layer"),
    ({"rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 8},
      "original_max_position_embeddings": 16}, "original_max_position_embeddings is 16, and 8"),
    ({"hidden_size": None}, "no entry 'hidden_size'"),
    ({"num_hidden_layers": None}, "no entry 'num_hidden_layers'"),
    ({"num_attention_heads": 0, "head_dim": None}, "entry of the wrong kind"),
    ({"hidden_size": "24", "head_dim": None}, "entry of the wrong kind"),
    ({"rope_scaling": "linear"}, "entry of the wrong kind"),
    ({"rms_norm_eps": "small"}, "could not convert"),
])
def test_a_feature_we_do_not_compute_is_refused_not_ignored(change: dict[str, Any], message: str) -> None:
    entries = ModelConfig.tiny().to_huggingface()
    ModelConfig.from_huggingface(entries)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_huggingface(entries | change)


def test_a_config_file_that_is_no_json_object_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_huggingface(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="JSON object"):
        ModelConfig.from_huggingface(path)
