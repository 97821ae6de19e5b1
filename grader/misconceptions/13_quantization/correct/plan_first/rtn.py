"""A plan of calls is made and checked first, then carried out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from labkit.quantized import QuantizedTensor

from .uniform import dequantize, quantize

_LINEAR = re.compile(r".*\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight")
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


def linear_weights(weights: Mapping[str, Tensor]) -> list[str]:
    """By a pattern."""
    return list(filter(_LINEAR.fullmatch, weights))


def quantize_linears(
    weights: Mapping[str, Tensor],
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    head_bits: int | None = None,
    short_groups: bool = False,
    quantize: Callable[..., QuantizedTensor] = quantize,
) -> dict[str, QuantizedTensor]:
    """Backwards through the model, sorted at the end."""
    for number, name in ((bits, "bits"), (8 if head_bits is None else head_bits, "head_bits")):
        if type(number) is not int or not 2 <= number <= 8:
            raise ValueError(f"{name} must be 2 to 8, got {number!r}")
    if type(group_size) is not int or group_size <= 0:
        raise ValueError(f"group_size must be positive, got {group_size!r}")
    plan = {
        name: partial(quantize, bits=bits, symmetric=symmetric, granularity="group", group_size=group_size)
        for name in linear_weights(weights)
    }
    if not plan:
        raise ValueError("this is no model: it has no linear layer")
    for name in plan:
        _check(name, weights[name])
        if not short_groups and weights[name].shape[1] // group_size * group_size != weights[name].shape[1]:
            raise ValueError(f"groups of {group_size} do not fit into {name} with rows of {weights[name].shape[1]}")
    if head_bits is not None:
        heads = [name for name in _HEADS if name in weights]
        if not heads:
            raise ValueError("there is no head to quantize")
        _check(heads[0], weights[heads[0]])
        plan[heads[0]] = partial(quantize, bits=head_bits, symmetric=symmetric, granularity="channel")
    done = {name: plan[name](weights[name]) for name in reversed(plan)}
    return dict(sorted(done.items(), key=lambda item: list(weights).index(item[0])))


def rebuild(
    weights: Mapping[str, Tensor],
    quantized: Mapping[str, QuantizedTensor],
    dequantize: Callable[[QuantizedTensor], Tensor] = dequantize,
) -> dict[str, Tensor]:
    """A copy of the mapping with some of its entries replaced."""
    model = dict(weights)
    for name, q in quantized.items():
        if name not in model or model[name].shape != q.codes.shape:
            raise ValueError(f"{name} with codes {list(q.codes.shape)} does not belong to this model")
    for name, q in quantized.items():
        model[name] = dequantize(q).to(model[name].dtype)
    return model


def model_bytes(
    weights: Mapping[str, Tensor], quantized: Mapping[str, QuantizedTensor], scale_bits: int = 16, high_bits: int = 16
) -> int:
    """As if all were high, and then what each quantized matrix saves."""
    if min(scale_bits, high_bits) < 1:
        raise ValueError("bits must be positive")
    bits = high_bits * sum(weight.numel() for weight in weights.values())
    for name, q in quantized.items():
        if name not in weights:
            raise ValueError(f"{name} is none of the model's weights")
        shared = scale_bits if q.zero_point is None else scale_bits + q.bits
        bits += q.codes.numel() * (q.bits - high_bits) + q.scale.numel() * shared
    return (bits + 7) // 8


def _check(name: str, weight: Tensor) -> None:
    if weight.dim() != 2 or not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{name} is no matrix of finite numbers")
