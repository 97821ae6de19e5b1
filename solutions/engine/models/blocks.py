"""What families are made of: projections, norms, attention with grouped heads, and the frame around layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import rope_frequencies

from .dense import Linear, dense
from .kv_shape import KVShape
from .packed_attention import PackedAttention
from .parts import Part, rms_norm
from .rotation import Rotation
from .windows import Windows, window_of

Weights = Mapping[str, Tensor]
"""Tensors under their Hugging Face names."""


class HeldWeights(Mapping[str, Tensor], ABC):
    """Weights whose projections are not, or not only, made of their tensors; see `weights.store`."""

    @abstractmethod
    def joins(self, name: str) -> bool:
        """Whether `joined` makes the layer `name`, given without ".weight"."""

    @abstractmethod
    def joined(self, names: Sequence[str]) -> Linear:
        """Projections of the same inputs as one, without their biases.

        Raises:
            ValueError: a layer that can't be held so, or can't run; the message names it.
        """

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> HeldWeights:
        """The same layers among other tensors: fewer of them, or of another type."""


Record = Callable[[int, Tensor], None]
"""Given the hidden states `[tokens, hidden]` between layers, numbered as `labkit.decoder.Decoder.hidden_states`."""

FeedForward = Callable[[Tensor], Tensor]
"""What a layer computes token by token, `[tokens, hidden] -> [tokens, hidden]`."""


class Attention(Protocol):
    """The attention of one layer: hidden states, and what turns heads by their places."""

    window: int | None
    """Newest tokens that a query sees, its own included; None means all."""

    def __call__(self, index: int, hidden: Tensor, rotation: Rotation, attend: PackedAttention) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""


class Decoder(Part):
    """The frame of every family: embedding, layers, a norm, and logits only where they are asked for.

    Args:
        config: what all families have; its `head_dim` is as wide as what RoPE turns.
        weights: in the dtype to compute in; norms and RoPE use at least float32.
        layers: in order.
        kv_shape: what the layers keep of a token.
        frequencies: angle that a position adds to each pair, in radians; by default those of `config`.
        rope_gain: factor on cosines and sines.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, layers: Sequence[Layer], kv_shape: KVShape,
        frequencies: Tensor | None = None, rope_gain: float = 1.0,
    ) -> None:  # fmt: skip
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        self.kv_shape = kv_shape
        self._layers = list(layers)
        self.embedding = weights["model.embed_tokens.weight"]
        self.dtype = self.embedding.dtype
        self.device = self.embedding.device
        self._norm = weights["model.norm.weight"]
        self._head = joined(weights, ["model.embed_tokens" if config.tie_embeddings else "lm_head"])
        self._norm_eps = config.norm_eps
        self.num_bytes_read = None if isinstance(weights, HeldWeights) else _num_bytes_read(weights, config)
        """Bytes of weights that a pass over one token reads, if it reads all of them; None if they may be codes."""
        self._frequencies = (rope_frequencies(config) if frequencies is None else frequencies).to(self.device)
        self._rope_gain = rope_gain

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: PackedAttention, rows: Tensor, record: Record | None = None
    ) -> Tensor:
        """Logits after some of the tokens.

        Args:
            tokens: ids, int64 `[tokens]`, those of a request side by side.
            positions: of each in its own text, int64 `[tokens]`.
            attend: called once for each layer, in order.
            rows: indices into `tokens`, int64 `[rows]`: where logits are wanted.
            record: called with what stands before each layer, and with what the head reads.

        Returns:
            `[rows, vocab_size]`
        """
        rotation = self._rows.rotation(positions, self._frequencies, self._rope_gain)
        hidden = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self._layers):
            if record is not None:
                record(index, hidden)
            hidden = layer(index, hidden, rotation, attend)
        if record is not None:
            record(len(self._layers), self._rows.norm(hidden, self._norm, self._norm_eps))
        return self._head(self._rows.norm(hidden[rows], self._norm, self._norm_eps))

    def num_tokens_read(self, length: int) -> float:
        """Tokens of a text of so many that the next one has to read, on average over layers."""
        return sum(min(length, layer.window or length) for layer in self._layers) / len(self._layers)


class Layer(Part):
    """One transformer block: attention, then what is computed token by token, each behind a norm and added."""

    def __init__(
        self, weights: Weights, name: str, attention: Attention, feed_forward: FeedForward, norm_eps: float
    ) -> None:
        self._norms = [weights[f"{name}.{norm}.weight"] for norm in ("input_layernorm", "post_attention_layernorm")]
        self._attention = attention
        self._feed_forward = feed_forward
        self._norm_eps = norm_eps

    @property
    def window(self) -> int | None:
        """See `Attention`."""
        return self._attention.window

    def __call__(self, index: int, hidden: Tensor, rotation: Rotation, attend: PackedAttention) -> Tensor:
        normed = self._rows.norm(hidden, self._norms[0], self._norm_eps)
        read = self._attention(index, normed, rotation, attend)
        normed, hidden = self._rows.add_norm(read, hidden, self._norms[1], self._norm_eps)
        return hidden + self._feed_forward(normed)


class GroupedAttention(Part):
    """Attention whose query heads share keys and values in groups, with one product for queries, keys and values.

    Where a checkpoint has `q_norm` and `k_norm`, each head of queries and keys is normed before it is turned.

    Args:
        config: of the model.
        weights: of the model.
        name: of the layer's attention among them.
        window: newest tokens that a query sees, its own included; None means all.
    """

    def __init__(self, config: ModelConfig, weights: Weights, name: str, window: int | None = None) -> None:
        self._config = config
        self.window = window
        self._qkv = joined(weights, [f"{name}.{part}_proj" for part in "qkv"])
        self._out = joined(weights, [f"{name}.o_proj"])
        self._q_norm = weights.get(f"{name}.q_norm.weight")
        self._k_norm = weights.get(f"{name}.k_norm.weight")

    def __call__(self, index: int, hidden: Tensor, rotation: Rotation, attend: PackedAttention) -> Tensor:
        """See `Attention`."""
        config = self._config
        heads = self._qkv(hidden).view(hidden.shape[0], -1, config.head_dim)
        turned, v = heads.split_with_sizes([config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = turned.split([config.num_heads, config.num_kv_heads], dim=1)
            q, k = rms_norm(q, self._q_norm, config.norm_eps), rms_norm(k, self._k_norm, config.norm_eps)
            turned = torch.cat((q, k), dim=1)
        q, k = rotation(turned).split_with_sizes([config.num_heads, config.num_kv_heads], dim=1)
        read = attend(index, q, k, v, self.window)
        return self._out(read.flatten(1))


class GatedMLP(Part):
    """`down(silu(gate(x)) · up(x))`, gate and up in one product.

    Args:
        weights: of the model.
        gate: name of its projection; likewise the others.
    """

    def __init__(self, weights: Weights, gate: str, up: str, down: str) -> None:
        self._gate_up = joined(weights, [gate, up])
        self._down = joined(weights, [down])

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        gate, up = self._gate_up(hidden).chunk(2, dim=-1)
        return self._down(self._rows.swiglu(gate, up))


def gated_mlp(weights: Weights, name: str) -> GatedMLP:
    """The MLP under a name, with the usual names of its projections."""
    return GatedMLP(weights, f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj")


def grouped_layers(
    config: ModelConfig, weights: Weights, windows: Windows, feed_forward: Callable[[str], FeedForward]
) -> list[Layer]:
    """Layers with grouped heads, each with the feed-forward part that is made for its name.

    Raises:
        ValueError: not one window for each layer.
    """
    layers = []
    for index in range(config.num_layers):
        name = f"model.layers.{index}"
        window = window_of(windows, index, config.num_layers)
        attention = GroupedAttention(config, weights, f"{name}.self_attn", window)
        layers.append(Layer(weights, name, attention, feed_forward(name), config.norm_eps))
    return layers


def grouped_shape(config: ModelConfig) -> KVShape:
    """What layers with grouped heads keep: keys and values."""
    return KVShape(config.num_layers, 2, config.num_kv_heads, config.head_dim)


def _num_bytes_read(weights: Weights, config: ModelConfig) -> int:
    """All but the embedding, of which a token reads a row; unless it is the output projection as well."""
    skipped = None if config.tie_embeddings else "model.embed_tokens.weight"
    return sum(one.numel() * one.element_size() for name, one in weights.items() if name != skipped)


def joined(weights: Weights, names: list[str]) -> Linear:
    """Several projections of the same input as one: fewer and larger products, the same numbers."""
    matrices = [weights[f"{name}.weight"] for name in names]
    bias = _joined_bias([weights.get(f"{name}.bias") for name in names], [len(matrix) for matrix in matrices])
    if isinstance(weights, HeldWeights) and any(weights.joins(name) for name in names):
        product = weights.joined(names)
        return product if bias is None else lambda inputs: product(inputs) + bias
    return dense(matrices[0] if len(matrices) == 1 else torch.cat(matrices), bias)


def _joined_bias(biases: list[Tensor | None], rows: list[int]) -> Tensor | None:
    """The biases of several projections side by side, with zeros for those that have none."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    return torch.cat([
        given[0].new_zeros(count) if bias is None else bias for bias, count in zip(biases, rows, strict=True)
    ])  # fmt: skip


def fitting(family: str, shapes: Mapping[str, tuple[int, ...]], weights: Weights, dtype: torch.dtype) -> Weights:
    """The weights of a model in the dtype to compute in, once they are known to be all there is.

    Raises:
        ValueError: weights that are missing, unknown, of another shape or not floating point.
    """
    missing = [name for name in shapes if name not in weights]
    unknown = [name for name in weights if name not in shapes]
    for problem, names in (("lacks", missing), ("does not know", unknown)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"a {family} model of this configuration {problem} the weights {', '.join(names[:3])}{more}"
            )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"weight {name} must have the shape {shape}, got {tuple(weights[name].shape)}")
        if not weights[name].is_floating_point():
            raise ValueError(f"weight {name} must be floating point, got {weights[name].dtype}")
    return same_kind(weights, {name: weight.to(dtype) for name, weight in weights.items()})


def same_kind(weights: Weights, tensors: dict[str, Tensor]) -> Weights:
    """Other tensors of a model, whose projections are quantized as those of `weights` are."""
    return weights.with_tensors(tensors) if isinstance(weights, HeldWeights) else tensors
