"""Task 10: one layer of a checkpoint, from the names, types and shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from labkit.checkpoint_audit import GGUF_TYPES, TYPE_BYTES, StatedScheme, StoredLayer

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""dtype and shape of each tensor, by name or by the part of a layer that it is."""

PARTS = (
    "qweight", "qzeros", "scales", "g_idx",
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "SCB", "weight_format", "weight",
)  # fmt: skip
"""Names that tensors of a layer have behind the layer's own. Biases and activation scales are tensors of their own."""


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes that a tensor takes.

    Args:
        dtype: the name of its type in safetensors or GGUF.
        shape: its axes; none for a single number.

    Raises:
        ValueError: an unknown type, or a number of elements that is no multiple of its block.
    """
    count = math.prod(shape)
    if dtype not in TYPE_BYTES and dtype not in GGUF_TYPES:
        raise ValueError(f"the type {dtype!r} is unknown; known are {', '.join([*TYPE_BYTES, *GGUF_TYPES])}")
    if dtype in GGUF_TYPES and count % GGUF_TYPES[dtype].elements:
        raise ValueError(f"{count} numbers do not fill blocks of {GGUF_TYPES[dtype].elements}, as {dtype} needs")
    # BEGIN SOLUTION
    if dtype in TYPE_BYTES:
        return count * TYPE_BYTES[dtype]
    block = GGUF_TYPES[dtype]
    return count // block.elements * block.num_bytes
    # END SOLUTION


def layer_parts(tensors: Tensors) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Tensors put together by layer.

    Args:
        tensors: of a checkpoint, under their full names.

    Returns:
        For each layer, in the order in which the first of its tensors turns up, its tensors by part. A tensor whose
        name ends in none of `PARTS` is a layer by itself, with the part "".
    """
    # BEGIN SOLUTION
    layers: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, tensor in tensors.items():
        part = next((part for part in PARTS if name.endswith(f".{part}")), "")
        layer = name[: -len(part) - 1] if part else name
        layers.setdefault(layer, {})[part] = tensor
    return layers
    # END SOLUTION


def read_layer(name: str, parts: Tensors, stated: StatedScheme) -> StoredLayer | None:
    """How a layer is quantized, by its tensors as far as they tell, by the config where they don't.

    - GPTQ: qweight `[in · bits / 32, out]`, scales `[groups, out]`, g_idx `[in]`, zero points always.
    - AWQ: qweight `[in, out · bits / 32]`, scales `[groups, out]`, zero points always.
    - compressed-tensors, packed: weight_packed `[out, ⌈in · bits / 32⌉]` (8 instead of 32 if it is U8), weight_scale
      `[out, groups]`, and weight_zero_point unless symmetric. What the last word of a row has left over can't be seen;
      but a row has no more columns than its groups.
    - weight `[out, in]` in I8 or F8 with weight_scale, weight_scale_inv or SCB of any shape; symmetric unless there is
      a weight_zero_point.
    - bitsandbytes: weight in U8 with two codes a byte, weight.absmax with one number a block; its codes are levels of a
      table, neither symmetric nor not.
    - GGUF: weight in a block type.

    Args:
        name: of the layer.
        parts: its tensors by part.
        stated: what the config says of it. Bits are needed for GPTQ without g_idx and for packed weights; a stated
            group size counts if the number of scales agrees with it, and else weights by scales, rounded up.

    Returns:
        The layer; None if it is not quantized.

    Raises:
        ValueError: codes without scales, a type that is unknown, or bits that neither config nor tensors tell.
    """
    # BEGIN SOLUTION
    num_bytes = sum(stored_bytes(*tensor) for tensor in parts.values())
    dtype, shape = parts.get("weight", parts.get("", ("F32", ())))
    if dtype in GGUF_TYPES:
        block = GGUF_TYPES[dtype]
        return StoredLayer(name, block.bits, block.group_size, block.symmetric, math.prod(shape), num_bytes)
    if "qweight" in parts:
        bits, columns, rows = _word_sizes(name, parts, stated)
        symmetric = stated.symmetric
    elif "weight_packed" in parts:
        bits, (word_type, (rows, words)) = _bits(name, stated.bits), parts["weight_packed"]
        columns = words * 8 * TYPE_BYTES[word_type] // bits
        if stated.group_size is not None and stated.group_size > 0:
            columns = min(columns, _scales(name, parts) // rows * stated.group_size)
        symmetric = "weight_zero_point" not in parts
    elif "weight.absmax" in parts:
        bits, rows, columns, symmetric = 4, 1, 2 * math.prod(shape), None
    elif dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2") and "weight" in parts:
        bits, (rows, columns), symmetric = 8, shape, "weight_zero_point" not in parts
    else:
        return None
    scales = _scales(name, parts)
    group_size = -(-rows * columns // scales)
    given = columns if stated.group_size == -1 else stated.group_size
    if given is not None and given > 0 and -(-columns // given) * rows == scales:
        group_size = given
    return StoredLayer(name, bits, group_size, symmetric, rows * columns, num_bytes)
    # END SOLUTION


# BEGIN SOLUTION
def _word_sizes(name: str, parts: Tensors, stated: StatedScheme) -> tuple[int, int, int]:
    """Bits, inputs and outputs of a layer in GPTQ's or AWQ's layout."""
    height, width = parts["qweight"][1]
    _scales(name, parts)
    outputs = parts["scales"][1][-1]
    if width < outputs:  # AWQ packs along the outputs
        return 32 * width // outputs, height, outputs
    if "g_idx" in parts:
        inputs = parts["g_idx"][1][0]
        return 32 * height // inputs, inputs, outputs
    bits = _bits(name, stated.bits)
    return bits, 32 * height // bits, outputs


def _bits(name: str, stated: int | None) -> int:
    if stated is None or not 1 <= stated <= 8:
        raise ValueError(f"{name} is packed, but the config does not say with how many bits; got {stated!r}")
    return stated


def _scales(name: str, parts: Tensors) -> int:
    """How many scales a layer has."""
    for part in ("scales", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB"):
        if part in parts:
            return math.prod(parts[part][1])
    raise ValueError(f"{name} has codes but no scales, only {', '.join(parts)}; the checkpoint is incomplete")


# END SOLUTION
