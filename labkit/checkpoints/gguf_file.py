"""GGUF files: sizes from the metadata, weights under Hugging Face names with Hugging Face's row order.

llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a Llama head, Hugging Face pairs (i, i + head_dim / 2), so the
rows of q and k lie in another order in a Llama GGUF. Qwen2 GGUFs keep Hugging Face's order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from labkit.checkpoints.errors import CheckpointError
from labkit.config import ARCHITECTURES, ModelConfig, RopeScaling
from labkit.decoder import rope_frequencies

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)` while a long job runs."""

_REQUIRED: Any = object()
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: str | Path) -> GGUFReader:
    """Open a GGUF file by memory map.

    Raises:
        CheckpointError: no such file, or one that is corrupt, truncated or of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no GGUF file at {path}; check the path")
    try:
        return GGUFReader(path)
    # A damaged header makes the reader fail in as many ways as there are bytes to damage.
    except Exception as error:
        raise CheckpointError(f"{path} is not a readable GGUF file, perhaps truncated ({error}); "
                              f"download it again") from error


def metadata(reader: GGUFReader, key: str, default: Any = _REQUIRED) -> Any:
    """Return the value of one metadata key.

    Raises:
        CheckpointError: the key is absent and no default was given, or its value is damaged.
    """
    field = reader.get_field(key)
    if field is not None:
        try:
            return field.contents()
        except ValueError as error:
            raise CheckpointError(f"the GGUF metadata {key!r} is damaged ({error}); download the file again") from error
    if default is _REQUIRED:
        raise CheckpointError(f"the GGUF file has no metadata {key!r}; it does not describe a complete model")
    return default


def read_config(reader: GGUFReader) -> ModelConfig:
    """Return the sizes of the model in an open GGUF file.

    Raises:
        CheckpointError: an architecture or feature that the decoder does not compute, or missing metadata.
    """
    architecture = metadata(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported; "
                              f"choose a model of architecture {' or '.join(ARCHITECTURES)}")

    def value(key: str, default: Any = _REQUIRED) -> Any:
        return metadata(reader, f"{architecture}.{key}", default)

    if value("expert_count", 0):
        raise CheckpointError("mixture-of-experts GGUF files are not supported; choose a dense model")
    shapes = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise CheckpointError("the GGUF file lacks the tensor token_embd.weight; download it again")
    hidden_size, num_heads = value("embedding_length"), value("attention.head_count")
    num_kv_heads = value("attention.head_count_kv", num_heads)
    if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
        raise CheckpointError("head counts that differ from layer to layer are not supported; choose another model")
    if not isinstance(hidden_size, int):
        raise CheckpointError(f"the GGUF embedding_length must be a whole number, got {hidden_size!r}")
    head_dim = value("attention.key_length", hidden_size // max(num_heads, 1))
    if value("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"RoPE over {value('rope.dimension_count')} of {head_dim} dimensions is not supported; "
                              f"the decoder rotates whole heads")
    try:
        config = ModelConfig(
            architecture=architecture,
            # Some files name no vocabulary size, and the table may be longer than the tokenizer's list.
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden_size,
            intermediate_size=value("feed_forward_length"),
            num_layers=value("block_count"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_context=value("context_length"),
            # Stored as float32; the shortest decimal with the same float32 is what the model's authors wrote.
            rope_theta=_shortest(value("rope.freq_base", 10_000.0)),
            norm_eps=_shortest(value("attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in shapes,
            attention_bias="blk.0.attn_q.bias" in shapes,
            rope_scaling=_rope_scaling(reader, architecture),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"the GGUF file describes no model that the decoder can run: {error}") from error
    _check_rope_factors(reader, config)
    return config


def read_weights(reader: GGUFReader, config: ModelConfig, progress: Progress | None = None) -> dict[str, Tensor]:
    """Dequantize all weights.

    Args:
        reader: an open GGUF file.
        config: what `read_config` returned for it.
        progress: called after each tensor.

    Returns:
        float32 tensors under their Hugging Face names.

    Raises:
        CheckpointError: a tensor with an unknown name or a type that cannot be dequantized.
    """
    weights = {}
    for index, tensor in enumerate(reader.tensors):
        if tensor.name != _ROPE_FACTORS:
            name = huggingface_name(tensor.name)
            weight = torch.from_numpy(_dequantize(tensor))
            weights[name] = undo_permutation(name, weight, config)
        if progress is not None:
            progress(index + 1, len(reader.tensors))
    return weights


def huggingface_name(gguf_name: str) -> str:
    """Translate a tensor's name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        CheckpointError: no tensor of a Llama or Qwen2 model has this name.
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", gguf_name)
    if match is not None:
        layer, part, kind = match.groups()
        if layer is None and part in _MODEL_NAMES:
            return f"{_MODEL_NAMES[part]}.{kind}"
        if layer is not None and part in _LAYER_NAMES:
            return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}"
    raise CheckpointError(f"the GGUF file holds the tensor {gguf_name!r}, which no Llama or Qwen2 model has; "
                          f"the decoder would ignore it and be wrong")


def gguf_name(name: str) -> str:
    """The way back: `model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`.

    Raises:
        CheckpointError: no tensor of a Llama or Qwen2 model has this name.
    """
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?([a-z_.]+)\.(weight|bias)", name)
    if match is not None:
        layer, part, kind = match.groups()
        table = _MODEL_NAMES if layer is None else _LAYER_NAMES
        for short, long in table.items():
            if long == part:
                return f"{short}.{kind}" if layer is None else f"blk.{int(layer)}.{short}.{kind}"
    raise CheckpointError(f"no Llama or Qwen2 model has a tensor {name!r}")


def undo_permutation(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Bring the rows of a Llama's q and k back: head by head from neighbouring pairs to two halves."""
    if config.architecture != "llama":
        return weight
    if ".q_proj." in name:
        num_heads = config.num_heads
    elif ".k_proj." in name:
        num_heads = config.num_kv_heads
    else:
        return weight
    if weight.shape[0] != num_heads * config.head_dim:
        raise CheckpointError(f"{name} has {weight.shape[0]} rows; {num_heads} heads of {config.head_dim} "
                              f"need {num_heads * config.head_dim}")
    pairs = weight.unflatten(0, (num_heads, config.head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def _dequantize(tensor: ReaderTensor) -> np.ndarray:
    kind = tensor.tensor_type
    try:
        values = dequantize(tensor.data, kind)
    except (NotImplementedError, KeyError) as error:
        raise CheckpointError(f"the GGUF tensor {tensor.name} has the type {kind.name}, which cannot be dequantized "
                              f"here; choose another quantization of the model, for instance Q4_K_M or Q8_0") from error
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        # These two come back as views of the file, which is mapped read-only.
        values = np.array(values, dtype=np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _rope_scaling(reader: GGUFReader, architecture: str) -> RopeScaling | None:
    kind = metadata(reader, f"{architecture}.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", _shortest(metadata(reader, f"{architecture}.rope.scaling.factor")))
    if kind != "none":
        raise CheckpointError(f"RoPE scaling {kind!r} is not supported; choose a model without it")
    factors = _rope_factors(reader)
    return None if factors is None else RopeScaling("llama3", _shortest(factors.max()))


def _rope_factors(reader: GGUFReader) -> np.ndarray | None:
    """Return the divisor of each RoPE frequency, `[head_dim / 2]`: what the file keeps of Llama 3.1's scaling."""
    found = [tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]
    return _dequantize(found[0]) if found else None


def _check_rope_factors(reader: GGUFReader, config: ModelConfig) -> None:
    """Refuse divisors other than those that the published constants of Llama 3.1 give."""
    factors = _rope_factors(reader)
    if factors is None:
        return
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    expected = (plain / rope_frequencies(config)).numpy()
    if factors.shape != expected.shape or np.abs(factors / expected - 1).max() > 1e-3:
        raise CheckpointError("the RoPE divisors in rope_freqs.weight are not those of Llama 3.1; "
                              "give the model's Hugging Face folder instead")
