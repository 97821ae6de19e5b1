"""Goes through the model in its own order, with block-diagonal matrices for heads."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import check_weights

from .hadamard import hadamard_transform


def outlier_ratio(values: Tensor) -> Tensor:
    """In float64, by the norm."""
    if not values.is_floating_point() or not values.isfinite().all():
        raise ValueError("outlier_ratio needs finite floats")
    largest = values.double().abs().amax(-1, keepdim=True)
    scaled = values.double() / largest.clamp(min=5e-324)
    ratio = values.shape[-1] ** 0.5 / scaled.norm(dim=-1)
    ratio = torch.where(largest.squeeze(-1) == 0, 1.0, ratio)
    return ratio if values.dtype == torch.float64 else ratio.float()


def fold_gains(config: ModelConfig, weights: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Column by column: diag(gain) from the right."""
    check_weights(config, weights)
    result = {name: weight.clone() for name, weight in weights.items()}
    result.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())

    def fold(norm: str, *readers: str) -> None:
        diagonal = torch.diag(result[norm].double())
        for name in readers:
            result[name] = (result[name].double() @ diagonal).to(result[name].dtype)
        result[norm].fill_(1)

    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        fold(f"model.layers.{i}.input_layernorm.weight", *(f"{attention}.{x}_proj.weight" for x in "qkv"))
        fold(f"model.layers.{i}.post_attention_layernorm.weight", f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    fold("model.norm.weight", "lm_head.weight")
    return ModelConfig(**{**vars(config), "tie_embeddings": False}), result


def rotate_residual(config: ModelConfig, weights: dict[str, Tensor], rotation: Tensor) -> dict[str, Tensor]:
    """Layer by layer."""
    check_weights(config, weights)
    if config.tie_embeddings:
        raise ValueError("the embeddings are tied")
    for name, weight in weights.items():
        if "norm" in name and not (weight == 1).all():
            raise ValueError(f"fold {name} first")
    _check(rotation, config.hidden_size)
    q, result = rotation.double(), dict(weights)

    def read(name: str) -> None:
        result[name] = torch.einsum("oi,ij->oj", weights[name].double(), q).to(weights[name].dtype)

    def write(name: str) -> None:
        result[f"{name}.weight"] = torch.einsum(
            "oi,oj->ji", weights[f"{name}.weight"].double(), q
        ).to(weights[f"{name}.weight"].dtype)  # fmt: skip
        if f"{name}.bias" in weights:
            result[f"{name}.bias"] = (weights[f"{name}.bias"].double() @ q).to(weights[f"{name}.bias"].dtype)

    read("model.embed_tokens.weight")
    for i in range(config.num_layers):
        for x in "qkv":
            read(f"model.layers.{i}.self_attn.{x}_proj.weight")
        write(f"model.layers.{i}.self_attn.o_proj")
        read(f"model.layers.{i}.mlp.gate_proj.weight")
        read(f"model.layers.{i}.mlp.up_proj.weight")
        write(f"model.layers.{i}.mlp.down_proj")
    read("lm_head.weight")
    return result


def rotate_heads(config: ModelConfig, weights: dict[str, Tensor], rotation: Tensor) -> dict[str, Tensor]:
    """One block-diagonal matrix for all value heads, one for all query heads."""
    check_weights(config, weights)
    _check(rotation, config.head_dim)
    r, result = rotation.double(), dict(weights)
    values, queries = (torch.block_diag(*[r] * n) for n in (config.num_kv_heads, config.num_heads))
    for i in range(config.num_layers):
        attention = f"model.layers.{i}.self_attn"
        for layer, matrix, left in (
            ("v_proj.weight", values, 1),
            ("v_proj.bias", values, 1),
            ("o_proj.weight", queries, 0),
        ):
            name = f"{attention}.{layer}"
            if name in weights:
                old = weights[name].double()
                result[name] = (matrix.T @ old if left else old @ matrix).to(weights[name].dtype)
    return result


def rotate_gated(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Row by row."""
    check_weights(config, weights)
    result = dict(weights)
    for i in range(config.num_layers):
        name = f"model.layers.{i}.mlp.down_proj.weight"
        rows = [hadamard_transform(row.double()) for row in weights[name]]
        result[name] = torch.stack(rows).to(weights[name].dtype)
    return result


def _check(rotation: Tensor, size: int) -> None:
    if rotation.shape != (size, size) or not rotation.isfinite().all():
        raise ValueError(f"rotation must be finite, {size} × {size}")
    if (rotation.double() @ rotation.double().T - torch.eye(size).double()).abs().max() > 1e-5:
        raise ValueError("rotation must be orthogonal")
