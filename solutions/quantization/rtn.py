"""Task 3: round to nearest over a whole model: which matrices, what stays high, and what it weighs afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from labkit.checks import check_count
from labkit.quantization_checks import check_bits, check_matrix
from labkit.quantized import QuantizedTensor

from .uniform import dequantize, quantize

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block, as Hugging Face names them."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def linear_weights(weights: Mapping[str, Tensor]) -> list[str]:
    """The names of the linear layers' weights, in the order of the mapping.

    Args:
        weights: a model's tensors under their Hugging Face names.

    Returns:
        Names such as `model.layers.0.self_attn.q_proj.weight`; no embedding, no head, no norm, no bias.
    """
    # BEGIN SOLUTION
    endings = tuple(f".{linear}.weight" for linear in LINEARS)
    return [name for name in weights if name.endswith(endings)]
    # END SOLUTION


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
    """Round the weights of a model's linear layers to the nearest code, in groups along each row.

    Embeddings and head stay as they are. On request the matrix that makes the logits is quantized too, with one scale a
    row: `lm_head.weight`, or where the head is tied to the embedding, `model.embed_tokens.weight`.

    Args:
        weights: a model's tensors under their Hugging Face names; not changed.
        bits: of the linear layers' codes, 2 to 8.
        group_size: neighbours within a row that share a scale, at least 1.
        symmetric: signed codes without zero points, for linear layers and head alike.
        head_bits: bits of the head's codes; None leaves it high.
        short_groups: let the last group of a row be shorter where the group size does not divide the row.
        quantize: does it for one matrix, with the arguments of task 1's `quantize`.

    Returns:
        The quantized matrices by name, in the order of `weights`.

    Raises:
        ValueError: numbers of bits or a group size that can't be, no linear layer, a weight that is no matrix of finite
            numbers, or one whose rows the group size does not divide; the message names it. Nothing was quantized.

    Source: module section 4.3.
    """
    check_bits(bits)
    check_count("group_size", group_size, 1)
    if head_bits is not None:
        check_bits(head_bits)
    # BEGIN SOLUTION
    linears = linear_weights(weights)
    if not linears:
        raise ValueError(f"weights hold no linear layer; their names must end in {', '.join(LINEARS)} + '.weight'")
    for name in linears:
        check_matrix(name, weights[name])
        columns = weights[name].shape[1]
        if columns % group_size and not short_groups:
            raise ValueError(
                f"{name} has rows of {columns}, which groups of {group_size} do not divide; take a divisor such as "
                f"{math.gcd(columns, group_size)}, or allow short_groups"
            )
    head = None
    if head_bits is not None:
        head = HEAD if HEAD in weights else EMBEDDING
        if head not in weights:
            raise ValueError(f"weights hold neither {HEAD} nor {EMBEDDING}; leave head_bits out")
        check_matrix(head, weights[head])
    quantized = {}
    for name, weight in weights.items():
        if name in linears:
            quantized[name] = quantize(weight, bits, symmetric=symmetric, group_size=group_size)
        elif name == head:
            quantized[name] = quantize(weight, head_bits, symmetric=symmetric, granularity="channel")
    return quantized
    # END SOLUTION


def rebuild(
    weights: Mapping[str, Tensor],
    quantized: Mapping[str, QuantizedTensor],
    dequantize: Callable[[QuantizedTensor], Tensor] = dequantize,
) -> dict[str, Tensor]:
    """The model that the quantized matrices stand for.

    Args:
        weights: a model's tensors under their Hugging Face names; not changed.
        quantized: what takes the place of some of them.
        dequantize: makes a matrix of codes, as task 1's `dequantize` does.

    Returns:
        As `weights`, in the same order and of the same dtypes; tensors that weren't quantized are the same ones.

    Raises:
        ValueError: a quantized matrix whose name isn't among the weights, or whose shape is another.
    """
    for name, q in quantized.items():
        if name not in weights:
            raise ValueError(f"{name} is quantized, but not among the model's weights")
        if q.codes.shape != weights[name].shape:
            raise ValueError(f"{name} is {list(weights[name].shape)}, but its codes are {list(q.codes.shape)}")
    # BEGIN SOLUTION
    return {
        name: dequantize(quantized[name]).to(weight.dtype) if name in quantized else weight
        for name, weight in weights.items()
    }
    # END SOLUTION


def model_bytes(
    weights: Mapping[str, Tensor], quantized: Mapping[str, QuantizedTensor], scale_bits: int = 16, high_bits: int = 16
) -> int:
    """What a model weighs with some of its matrices quantized.

    Args:
        weights: a model's tensors under their Hugging Face names.
        quantized: those that are stored as codes, scales and zero points instead.
        scale_bits: of a scale, at least 1; a zero point takes the bits of a code.
        high_bits: of each number of the other tensors, at least 1.

    Returns:
        Bytes; a started byte at the very end counts as a whole one.

    Raises:
        ValueError: a quantized matrix whose name isn't among the weights, or bits that can't be.
    """
    check_count("scale_bits", scale_bits, 1)
    check_count("high_bits", high_bits, 1)
    for name in quantized:
        if name not in weights:
            raise ValueError(f"{name} is quantized, but not among the model's weights")
    # BEGIN SOLUTION
    total = sum(weight.numel() * high_bits for name, weight in weights.items() if name not in quantized)
    for q in quantized.values():
        zero_points = 0 if q.zero_point is None else q.zero_point.numel()
        total += q.codes.numel() * q.bits + q.scale.numel() * scale_bits + zero_points * q.bits
    return -(-total // 8)
    # END SOLUTION
