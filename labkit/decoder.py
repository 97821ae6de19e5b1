"""The given model: everything in a Llama or Qwen2 decoder except attention, which the caller supplies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.config import ModelConfig, RopeScaling

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Attend(Protocol):
    """Attention of one layer; this is where a cache comes in."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Return what each query reads.

        Args:
            layer: index of the layer, from 0.
            q: rotated queries of the new tokens, `[batch, heads, tokens, head_dim]`.
            k: rotated keys of the new tokens, `[batch, kv_heads, tokens, head_dim]`.
            v: values of the new tokens, `[batch, kv_heads, tokens, head_dim]`.
            positions: positions of the new tokens, `[batch, tokens]`.

        Returns:
            `[batch, heads, tokens, head_dim]`
        """


class Decoder:
    """A Llama or Qwen2 model that maps tokens to logits and takes its attention as an argument.

    Args:
        config: sizes of the model.
        weights: tensors under their Hugging Face names, exactly those of `weight_shapes(config)`.
        dtype: weights and activations have this type; norms, RoPE and its angles use at least float32.

    The model runs where its weights lie.

    Raises:
        ValueError: a weight that is missing, unknown or of the wrong shape, or a dtype that is no float.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor],
                 dtype: torch.dtype = torch.float32) -> None:
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {dtype}")
        check_weights(config, weights)
        self.config = config
        self.dtype = dtype
        self.weights = {name: weight.to(dtype) for name, weight in weights.items()}
        self.device = self.weights["model.embed_tokens.weight"].device
        self._inverse_frequencies = rope_frequencies(config).to(self.device)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Check the arguments, then run the model.

        Args:
            tokens: token ids, `[batch, tokens]` int64.
            positions: place of each token in its sequence, from 0; `[batch, tokens]`, or `[tokens]` for
                all rows alike.
            attend: attention; called once per layer, in order.

        Returns:
            Logits of the token after each given one, `[batch, tokens, vocab]`.

        Raises:
            ValueError: wrong shapes or types, ids outside the vocabulary, positions outside the context.
        """
        self.check_inputs(tokens, positions)
        return self.forward(tokens, positions, attend)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the model without checks, which cost a GPU a wait per step; otherwise as `__call__`."""
        # Only the last one is kept: a list of all would hold the activations of every layer.
        return self.head(deque(self.hidden_states(tokens, positions, attend), maxlen=1).pop())

    def hidden_states(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Iterator[Tensor]:
        """Run the model up to its head, without checks, and show what stands between its layers.

        Yields:
            `[batch, tokens, hidden]`, one more than there are layers: the embeddings, then what each layer leaves,
            the last one normed, as the head reads it. The numbering is that of transformers' `hidden_states`.
        """
        positions = positions.expand(tokens.shape)
        rotation = self.rotation(positions)
        hidden = self.embed(tokens)
        for layer in range(self.config.num_layers):
            yield hidden
            hidden = self.block(layer, hidden, rotation, positions, attend)
        yield self._norm(hidden, "model.norm")

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up token ids, `[batch, tokens]`, in the embedding table: `[batch, tokens, hidden]`."""
        return F.embedding(tokens, self.weights["model.embed_tokens.weight"])

    def block(
        self, layer: int, hidden: Tensor, rotation: tuple[Tensor, Tensor], positions: Tensor, attend: Attend
    ) -> Tensor:
        """Run one transformer block.

        Args:
            layer: its index, from 0.
            hidden: the residual stream, `[batch, tokens, hidden]`.
            rotation: what `rotation(positions)` returned.
            positions: `[batch, tokens]`.
            attend: attention.

        Returns:
            The residual stream after the block.
        """
        block = f"model.layers.{layer}"
        normed = self._norm(hidden, f"{block}.input_layernorm")
        q = self._heads(normed, f"{block}.self_attn.q_proj")
        k = self._heads(normed, f"{block}.self_attn.k_proj")
        v = self._heads(normed, f"{block}.self_attn.v_proj")
        cos, sin = rotation
        read = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v, positions)
        if read.shape != q.shape:
            raise ValueError(f"attention of layer {layer} returned shape {tuple(read.shape)}; "
                             f"expected that of the queries, {tuple(q.shape)}")
        hidden = hidden + self.linear(read.transpose(1, 2).flatten(2), f"{block}.self_attn.o_proj")
        normed = self._norm(hidden, f"{block}.post_attention_layernorm")
        gate = F.silu(self.linear(normed, f"{block}.mlp.gate_proj"))
        gated = gate * self.linear(normed, f"{block}.mlp.up_proj")
        return hidden + self.linear(gated, f"{block}.mlp.down_proj")

    def head(self, hidden: Tensor) -> Tensor:
        """The logits of normed hidden states: `[..., hidden] -> [..., vocab]`."""
        return self.linear(hidden, "model.embed_tokens" if self.config.tie_embeddings else "lm_head")

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        """Apply the projection `name`, with its bias if it has one: `[..., in] -> [..., out]`."""
        return F.linear(inputs, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _heads(self, inputs: Tensor, name: str) -> Tensor:
        """Project `[batch, tokens, hidden]` and split into `[batch, heads, tokens, head_dim]`."""
        return self.linear(inputs, name).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _norm(self, inputs: Tensor, name: str) -> Tensor:
        """RMSNorm: divide by the root of the mean square, in at least float32, then scale."""
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return wide.to(inputs.dtype) * self.weights[f"{name}.weight"]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the RoPE angles, `[batch, 1, tokens, head_dim / 2]` float32.

        The angles are float32 in every model: bfloat16 cannot tell position 256 from 257.
        """
        angles = positions[:, None, :, None].to(torch.float32) * self._inverse_frequencies
        return angles.cos(), angles.sin()

    def check_inputs(self, tokens: Tensor, positions: Tensor) -> None:
        for name, given in (("tokens", tokens), ("positions", positions)):
            if not isinstance(given, Tensor) or given.dtype != torch.int64:
                kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
                raise ValueError(f"{name} must be an int64 tensor, got {kind}")
            if given.device != self.device:
                raise ValueError(f"{name} are on {given.device}, the model is on {self.device}; move one of them")
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise ValueError(f"tokens must have the shape [batch, tokens] and not be empty, "
                             f"got {tuple(tokens.shape)}")
        if positions.shape not in (tokens.shape, tokens.shape[1:]):
            raise ValueError(f"positions must have the shape {tuple(tokens.shape)} of the tokens "
                             f"or {tuple(tokens.shape[1:])}, got {tuple(positions.shape)}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.config.vocab_size - 1}, "
                             f"got {low if low < 0 else high}")
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.config.max_context:
            raise ValueError(f"positions must lie in 0..{self.config.max_context - 1}, the context of this model, "
                             f"got {low if low < 0 else high}")


def full_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Causal attention of whole sequences with themselves, without a cache; an `Attend` for `Decoder`.

    Args:
        layer: not used.
        q: `[batch, heads, tokens, head_dim]`
        k: `[batch, kv_heads, tokens, head_dim]`
        v: `[batch, kv_heads, tokens, head_dim]`
        positions: `[batch, tokens]`, each row 0, 1, 2, …

    Returns:
        `[batch, heads, tokens, head_dim]`

    Raises:
        ValueError: not as many keys as queries, or positions that do not start a sequence: earlier tokens
            are then needed, and only a cache has them.
    """
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"full_attention relates a whole sequence to itself and needs as many keys as "
                         f"queries, got {q.shape[2]} queries and {k.shape[2]} keys")
    if not torch.equal(positions, torch.arange(q.shape[2], device=positions.device).expand_as(positions)):
        raise ValueError(f"full_attention needs the whole sequence, at positions 0..{q.shape[2] - 1}; "
                         f"these tokens follow others, so attention needs a cache")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim/2) of each head by their angles (RoPE, arXiv 2104.09864).

    Args:
        heads: `[batch, heads, tokens, head_dim]`
        cos: cosines of the angles, `[batch, 1, tokens, head_dim / 2]`
        sin: sines of the angles, of the same shape.

    Returns:
        As `heads`; computed in at least float32 and rounded once.
    """
    first, second = heads.to(torch.promote_types(heads.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Return the angle that one position adds to each pair, `[head_dim / 2]` float32, in radians."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow down RoPE for a longer context: all frequencies alike, or as in Llama 3.1 only the slow ones."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model, under its Hugging Face name."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}"
        shapes[f"{block}.input_layernorm.weight"] = (hidden,)
        for name, width in (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)):
            shapes[f"{block}.self_attn.{name}.weight"] = (width, hidden)
            if config.attention_bias:
                shapes[f"{block}.self_attn.{name}.bias"] = (width,)
        shapes[f"{block}.self_attn.o_proj.weight"] = (hidden, q_width)
        if config.attention_bias and config.architecture == "llama":
            shapes[f"{block}.self_attn.o_proj.bias"] = (hidden,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{block}.mlp.gate_proj.weight"] = (mlp, hidden)
        shapes[f"{block}.mlp.up_proj.weight"] = (mlp, hidden)
        shapes[f"{block}.mlp.down_proj.weight"] = (hidden, mlp)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `weights` has exactly the names and shapes that `config` asks for."""
    # Checked first: a damaged file may claim billions of layers, and naming all their weights would fill the memory.
    if len(weights) < config.num_layers:
        raise ValueError(f"a model of {config.num_layers} layers cannot have only {len(weights)} weights")
    shapes = weight_shapes(config)
    missing = [name for name in shapes if name not in weights]
    unknown = [name for name in weights if name not in shapes]
    for problem, names in (("lacks", missing), ("does not know", unknown)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"a {config.architecture} model of {config.num_layers} layers {problem} "
                             f"the weights {', '.join(names[:3])}{more}")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"weight {name} must have the shape {shape}, got {tuple(weights[name].shape)}")
        if not weights[name].is_floating_point():
            raise ValueError(f"weight {name} must be floating point, got {weights[name].dtype}")


def random_weights(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return weights of a model that was never trained but behaves like one in tests.

    Attention is peaked, the layers outweigh the embedding, norms differ from one and biases from zero, so
    that an error in any of them changes the logits.

    Args:
        config: sizes of the model.
        seed: the same seed gives the same weights, whatever the dtype.
        dtype: type of the returned tensors; the values are drawn in float32.

    Returns:
        Tensors under their Hugging Face names, as in `weight_shapes(config)`.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        elif name.endswith(".bias"):
            values = 0.5 * values
        elif name == "model.embed_tokens.weight":
            # Small, or a tied output projection would find the token just read again and repeat it for ever.
            values = 1.5 * values / math.sqrt(shape[1])
        else:
            values = 2.0 * values / math.sqrt(shape[1])
        weights[name] = values.to(dtype)
    return weights
