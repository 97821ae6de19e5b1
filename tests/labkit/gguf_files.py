"""Small GGUF files for tests, written by the gguf package, with llama.cpp's row order made by its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from labkit.config import ModelConfig

# Widths that every block of 32 divides; no two alike.
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_layers": 2,
                         "num_heads": 12, "num_kv_heads": 4, "head_dim": 8}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.1.mlp.up_proj.weight` is `blk.1.ffn_up.weight`."""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def llama_cpp_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Order rows as llama.cpp rotates them: element i of the first half, then element i of the second half."""
    head_dim = len(weight) // num_heads
    order = [head * head_dim + half * head_dim // 2 + i
             for head in range(num_heads) for i in range(head_dim // 2) for half in range(2)]
    return weight[order]


def byte_characters() -> list[str]:
    """The 256 characters that spell bytes, with space as U+0120."""
    printable = [c for c in range(256) if 0x21 <= c <= 0x7E or 0xA1 <= c <= 0xAC or c >= 0xAE]
    return [chr(c) for c in printable] + [chr(256 + n) for n in range(256 - len(printable))]


def tokens_of(config: ModelConfig) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: three control tokens, bytes, three merged words, unused ones to the end."""
    merges = ["h i", "\u0120 hi", "l l"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_characters(), "hi", "\u0120hi", "ll"]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    unused = config.vocab_size - len(tokens)
    return (tokens + [f"[PAD{n}]" for n in range(unused)],
            [int(kind) for kind in types] + [int(gguf.TokenType.UNUSED)] * unused, merges)


def write_gguf(path: Path, config: ModelConfig, weights: dict[str, Tensor], *, pre: str = "smollm",
               kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
               metadata: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None) -> None:
    """Write a model as llama.cpp's converter lays it out; vectors stay float32.

    `metadata` replaces or removes (None) single entries; `tensors` adds raw ones.
    """
    writer = gguf.GGUFWriter(path, config.architecture)
    a = config.architecture
    tokens, types, merges = tokens_of(config)
    entries: dict[str, Any] = {
        f"{a}.block_count": config.num_layers, f"{a}.context_length": config.max_context,
        f"{a}.embedding_length": config.hidden_size, f"{a}.feed_forward_length": config.intermediate_size,
        f"{a}.attention.head_count": config.num_heads, f"{a}.attention.head_count_kv": config.num_kv_heads,
        f"{a}.attention.key_length": config.head_dim, f"{a}.rope.freq_base": config.rope_theta,
        f"{a}.attention.layer_norm_rms_epsilon": config.norm_eps,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    } | (metadata or {})
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, weight in weights.items():
        values = weight.to(torch.float32).numpy()
        if config.architecture == "llama" and ".q_proj." in name:
            values = llama_cpp_rows(values, config.num_heads)
        if config.architecture == "llama" and ".k_proj." in name:
            values = llama_cpp_rows(values, config.num_kv_heads)
        stored = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(values, stored), raw_dtype=stored)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
