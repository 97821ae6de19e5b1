"""Task 14: QuaRot: a Llama whose outliers are spread over all channels, and whose answers are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Decoder, check_weights
from labkit.quantization_checks import check_finite
from labkit.rotation_checks import check_rotation

from .hadamard import hadamard_transform

Weights = Mapping[str, Tensor]

READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""The linear layers that read the residual stream."""

WRITERS = ("o_proj", "down_proj")
"""The linear layers that add to it."""


def outlier_ratio(values: Tensor) -> Tensor:
    """max |x| / rms(x) of each row: what a quantizer of whole rows suffers from.

    Args:
        values: `[..., n]` finite floats.

    Returns:
        `[...]` in at least float32, from 1 (all magnitudes are equal; a row of zeros, too) to √n (one value is all
        there is).

    Raises:
        ValueError: no floats, NaN or infinity.
    """
    check_finite("values", values)
    # BEGIN SOLUTION
    magnitudes = values.to(torch.promote_types(values.dtype, torch.float32)).abs()
    largest = magnitudes.amax(-1)
    # Divided by the largest before squaring, so that nothing overflows or vanishes.
    shares = magnitudes / torch.where(largest == 0, 1, largest).unsqueeze(-1)
    return torch.where(largest == 0, 1, 1 / shares.square().mean(-1).sqrt())
    # END SOLUTION


def fold_gains(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The same model with gains of 1: each RMSNorm's gain is multiplied into the layers that read it.

    Without its gain an RMSNorm commutes with every rotation, since a rotation keeps the mean square. The last norm's
    gain goes into the output projection, which therefore can't share its table with the embedding any more.

    Args:
        config: of the model, tied or not.
        weights: under their Hugging Face names, as in `labkit.decoder.weight_shapes`.

    Returns:
        The config, untied, and new weights in the dtypes of the old ones.

    Raises:
        ValueError: weights that don't fit the config.

    Source: Ashkboos et al. 2024 (2404.00456), section 4, stage 1a.
    """
    check_weights(config, weights)
    # BEGIN SOLUTION
    folded = dict(weights)
    if config.tie_embeddings:
        folded["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for norm, readers in _readers_of_norms(config):
        gain = weights[norm].double()
        for name in readers:
            folded[name] = (folded[name].double() * gain).to(folded[name].dtype)
        folded[norm] = torch.ones_like(weights[norm])
    return replace(config, tie_embeddings=False), folded
    # END SOLUTION


def rotate_residual(config: ModelConfig, weights: Weights, rotation: Tensor) -> dict[str, Tensor]:
    """The same model with a rotated residual stream: each h becomes h Q.

    Args:
        config: of the model, untied.
        weights: with gains of 1, as `fold_gains` leaves them.
        rotation: Q, orthogonal, `[hidden_size, hidden_size]`.

    Returns:
        New weights in the dtypes of the old ones, computed in float64. A layer that reads the stream becomes W Q,
        one that writes it Qᵀ W (its bias b Q); the embedding is E Q.

    Raises:
        ValueError: a tied config, weights that don't fit it, gains other than 1, or a rotation that isn't orthogonal
            or of another size.

    Source: Ashkboos et al. 2024 (2404.00456), section 4, stage 1a.
    """
    check_weights(config, weights)
    if config.tie_embeddings:
        raise ValueError("tied embeddings can't be rotated: fold the gains first, which unties them")
    unfolded = [name for name in weights if name.endswith("norm.weight") and bool((weights[name] != 1).any())]
    if unfolded:
        raise ValueError(f"the gain {unfolded[0]} isn't 1, so it doesn't commute with a rotation; fold the gains first")
    check_rotation("rotation", rotation, config.hidden_size)
    # BEGIN SOLUTION
    q = rotation.double()
    rotated = dict(weights)
    for name, weight in weights.items():
        module, kind = name.split(".")[-2:]
        if name in ("model.embed_tokens.weight", "lm_head.weight") or (module in READERS and kind == "weight"):
            rotated[name] = (weight.double() @ q).to(weight.dtype)
        elif module in WRITERS:
            rotated[name] = (q.T @ weight.double()).to(weight.dtype)
    return rotated
    # END SOLUTION


def rotate_heads(config: ModelConfig, weights: Weights, rotation: Tensor) -> dict[str, Tensor]:
    """The same model with rotated values: each head's v becomes v R, and the output projection undoes it.

    Attention adds up values with numbers that don't depend on them, so the rotation passes through.

    Args:
        config: of the model.
        weights: fit the config.
        rotation: R, orthogonal, `[head_dim, head_dim]`.

    Returns:
        New weights in the dtypes of the old ones, computed in float64.

    Raises:
        ValueError: weights that don't fit the config, or a rotation that isn't orthogonal or of another size.

    Source: Ashkboos et al. 2024 (2404.00456), section 4, stage 1c.
    """
    check_weights(config, weights)
    check_rotation("rotation", rotation, config.head_dim)
    # BEGIN SOLUTION
    r = rotation.double()
    rotated = dict(weights)
    for name, weight in weights.items():
        if ".v_proj." in name:
            # Row d of a head's block gives v_d, so rows are mixed; a bias is a column of them.
            rows = weight.double().reshape(config.num_kv_heads, config.head_dim, -1)
            rotated[name] = (r.T @ rows).reshape(weight.shape).to(weight.dtype)
        elif name.endswith("o_proj.weight"):
            columns = weight.double().unflatten(-1, (config.num_heads, config.head_dim))
            rotated[name] = (columns @ r).flatten(-2).to(weight.dtype)
    return rotated
    # END SOLUTION


def rotate_gated(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """The weights for a model that puts `hadamard_transform` before each `down_proj`, such as `OnlineHadamard`.

    What `down_proj` reads comes out of a product of two numbers each, through which no rotation passes; it has to be
    rotated while the model runs.

    Args:
        config: of the model; `intermediate_size` must be an order of `hadamard_matrix`.
        weights: fit the config.

    Returns:
        New weights in the dtypes of the old ones, computed in float64; only those of `down_proj` differ.

    Raises:
        ValueError: weights that don't fit the config, or an `intermediate_size` that `hadamard_matrix` refuses.

    Source: Ashkboos et al. 2024 (2404.00456), section 4, stage 1b.
    """
    check_weights(config, weights)
    # BEGIN SOLUTION
    rotated = dict(weights)
    for name, weight in weights.items():
        if name.endswith("down_proj.weight"):
            rotated[name] = hadamard_transform(weight.double()).to(weight.dtype)
    return rotated
    # END SOLUTION


class OnlineHadamard(Decoder):
    """A decoder that rotates what `down_proj` reads; for the weights of `rotate_gated`. Given."""

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        """Apply a projection as `Decoder.linear` does, behind the transform where it is `down_proj`."""
        return super().linear(hadamard_transform(inputs) if name.endswith("down_proj") else inputs, name)


# BEGIN SOLUTION
def _readers_of_norms(config: ModelConfig) -> list[tuple[str, list[str]]]:
    """Each norm's gain, and the weights of the layers that read it."""
    pairs = [("model.norm.weight", ["lm_head.weight"])]
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}"
        attention = [f"{block}.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
        pairs.append((f"{block}.input_layernorm.weight", attention))
        mlp = [f"{block}.mlp.{name}.weight" for name in ("gate_proj", "up_proj")]
        pairs.append((f"{block}.post_attention_layernorm.weight", mlp))
    return pairs


# END SOLUTION
