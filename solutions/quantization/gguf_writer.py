"""GGUF files that llama.cpp loads: a model's sizes, its tokenizer, and tensors as blocks.

llama.cpp turns neighbouring rows of a Llama head where Hugging Face turns rows of its two halves, so the rows of q and
k change places on the way out, k's by its own number of heads. Qwen2 files keep Hugging Face's order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from torch import Tensor

from labkit.checkpoints.gguf_file import gguf_name, metadata, open_gguf
from labkit.config import ModelConfig
from labkit.decoder import weight_shapes
from solutions.quantization.quantized_model import GgufTensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16}
_FILE_TYPE = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_S,
    "Q6_K": gguf.LlamaFileType.MOSTLY_Q6_K,
}


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, GgufTensor],
    tokenizer_from: Path,
    file_type: str,
    calibration: str,
) -> None:
    """Write a model. The finished file appears by one rename.

    Args:
        path: of the new file.
        config: sizes of the model.
        tensors: under their Hugging Face names, with Hugging Face's order of rows.
        tokenizer_from: a GGUF file of the same model; its tokenizer and general facts are carried over.
        file_type: the block type that most weights have.
        calibration: name of the text that the weights were calibrated on, for the record.

    Raises:
        ValueError: tensors that are not those of the model, RoPE scaling that the file cannot express, a tokenizer of
            another vocabulary, or `tokenizer_from` is no readable GGUF file.
    """
    if config.rope_scaling is not None:
        raise ValueError("GGUF export of a model with RoPE scaling is not supported; choose compressed-tensors")
    reader = open_gguf(tokenizer_from)
    size = len(metadata(reader, "tokenizer.ggml.tokens"))
    if size > config.vocab_size:
        raise ValueError(
            f"{tokenizer_from} has {size} tokens, the model's table {config.vocab_size}; take the tokenizer from a "
            f"GGUF file of the same model"
        )
    _check_names(config, tensors)
    unfinished = path.with_name(f".{path.name}.unfinished")
    writer = gguf.GGUFWriter(unfinished, config.architecture)
    _carry_over(writer, reader)
    _add_sizes(writer, config)
    writer.add_file_type(_FILE_TYPE.get(file_type, gguf.LlamaFileType.GUESSED))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("quantize.imatrix.dataset", calibration)
    for name, tensor in tensors.items():
        data = permute_rows(name, tensor.data, config).contiguous()
        if tensor.kind in _PLAIN:
            writer.add_tensor(gguf_name(name), data.to(_PLAIN[tensor.kind]).numpy())
        else:
            kind = GGMLQuantizationType[tensor.kind]
            writer.add_tensor(gguf_name(name), data.numpy().view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, path)


def permute_rows(name: str, rows: Tensor, config: ModelConfig) -> Tensor:
    """Bring the rows of a Llama's q and k from the two halves of each head to neighbouring pairs.

    Args:
        name: Hugging Face name of the tensor.
        rows: `[out, …]`, whatever a row holds: numbers, bytes or scales.
        config: sizes of the model.

    Returns:
        The same rows in llama.cpp's order; all other tensors as they are.
    """
    if config.architecture != "llama" or not any(part in name for part in (".q_proj.", ".k_proj.")):
        return rows
    num_heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    halves = rows.unflatten(0, (num_heads, 2, config.head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def _carry_over(writer: Any, reader: Any) -> None:
    """Copy the tokenizer and the facts about the model's origin, with the types that they have."""
    # The writer sets the first itself; the others tell how the old file was quantized.
    own = ("general.architecture", "general.file_type", "general.quantization_version")
    for key, field in reader.fields.items():
        if key.startswith(("tokenizer.", "general.")) and key not in own:
            # Of an array, the type of its elements stands last.
            element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], element)


def _add_sizes(writer: Any, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)


def _check_names(config: ModelConfig, tensors: Mapping[str, GgufTensor]) -> None:
    wanted = weight_shapes(config)
    absent, unknown = [n for n in wanted if n not in tensors], [n for n in tensors if n not in wanted]
    if absent or unknown:
        raise ValueError(f"tensors do not fit the model: missing {absent[:3]}, unknown {unknown[:3]}")
    for name, tensor in tensors.items():
        if tensor.data.shape[0] != wanted[name][0]:
            raise ValueError(f"{name} must have {wanted[name][0]} rows, got {tensor.data.shape[0]}")
