"""Llama and Qwen2 over the tokens of many requests laid end to end, with as few matrix products as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import check_weights, rope_frequencies, rotate


class PackedAttention(Protocol):
    """Attention of one layer over the tokens of all requests of a step."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores `k` and `v`, `[tokens, kv_heads, head_dim]`; returns what each of `q`, `[tokens, heads, head_dim]`,
        reads, in its shape."""


Linear = Callable[[Tensor], Tensor]
"""A projection `[tokens, in] -> [tokens, out]`: the seam for packed weights."""


class Llama:
    """A decoder that computes logits only where they are asked for.

    The three projections of attention are one matrix, and so are the two of the gated MLP: fewer and larger products,
    the same numbers.

    Args:
        config: sizes of the model.
        weights: tensors under their Hugging Face names.
        dtype: of weights and activations; norms and RoPE use at least float32.

    Raises:
        ValueError: weights that don't fit the configuration.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        check_weights(config, weights)
        self.config = config
        self.dtype = dtype
        given = {name: weight.to(dtype) for name, weight in weights.items()}
        self._embedding = given["model.embed_tokens.weight"]
        self._layers = [_Layer(config, given, f"model.layers.{layer}") for layer in range(config.num_layers)]
        self._norm = given["model.norm.weight"]
        self._head = dense(self._embedding if config.tie_embeddings else given["lm_head.weight"])
        self._frequencies = rope_frequencies(config)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: PackedAttention, rows: Tensor) -> Tensor:
        """Logits after some of the tokens.

        Args:
            tokens: ids, int64 `[tokens]`, those of a request side by side.
            positions: of each in its own text, int64 `[tokens]`.
            attend: called once for each layer, in order.
            rows: indices into `tokens`, int64 `[rows]`: where logits are wanted.

        Returns:
            `[rows, vocab_size]`
        """
        angles = positions[:, None].to(torch.float32) * self._frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        hidden = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            hidden = layer(index, hidden, cos, sin, attend)
        return self._head(rms_norm(hidden[rows], self._norm, self.config.norm_eps))


class _Layer:
    """One transformer block."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], name: str) -> None:
        self._config = config
        self._norms = [weights[f"{name}.{norm}.weight"] for norm in ("input_layernorm", "post_attention_layernorm")]
        self._qkv = _joined(weights, [f"{name}.self_attn.{part}_proj" for part in "qkv"])
        self._out = _joined(weights, [f"{name}.self_attn.o_proj"])
        self._gate_up = _joined(weights, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"])
        self._down = _joined(weights, [f"{name}.mlp.down_proj"])

    def __call__(self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: PackedAttention) -> Tensor:
        config = self._config
        normed = rms_norm(hidden, self._norms[0], config.norm_eps)
        heads = self._qkv(normed).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        read = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
        hidden = hidden + self._out(read.flatten(1))
        gate, up = self._gate_up(rms_norm(hidden, self._norms[1], config.norm_eps)).chunk(2, dim=-1)
        return hidden + self._down(F.silu(gate) * up)


def dense(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A projection with plain weights `[out, in]`."""
    return lambda inputs: F.linear(inputs, weight, bias)


def _joined(weights: Mapping[str, Tensor], names: list[str]) -> Linear:
    """Several projections of the same input as one."""
    biases = [weights.get(f"{name}.bias") for name in names]
    matrix = torch.cat([weights[f"{name}.weight"] for name in names])
    if all(bias is None for bias in biases):
        return dense(matrix)
    rows = [weights[f"{name}.weight"].shape[0] for name in names]
    return dense(matrix, torch.cat([
        matrix.new_zeros(count) if bias is None else bias for bias, count in zip(biases, rows, strict=True)
    ]))  # fmt: skip


def rms_norm(hidden: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Each row by the root of its mean square, in at least float32, then scaled."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(hidden.dtype) * gain
