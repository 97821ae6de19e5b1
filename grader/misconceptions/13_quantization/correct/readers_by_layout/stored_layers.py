"""A reader for each layout, tried in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping

from labkit.checkpoint_audit import GGUF_TYPES, TYPE_BYTES, StatedScheme, StoredLayer

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]

SUFFIXES = sorted(
    (
        "qweight qzeros scales g_idx weight_packed weight_scale weight_scale_inv weight_zero_point weight_shape "
        "weight_g_idx weight_global_scale weight.absmax weight.quant_map weight.nested_absmax weight.nested_quant_map "
        "weight.quant_state.bitsandbytes__nf4 weight.quant_state.bitsandbytes__fp4 SCB weight_format weight"
    ).split(),
    key=len,
    reverse=True,
)
SCALES = ("scales", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB")


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Elements by block by bytes; a plain number is a block of one."""
    if dtype in TYPE_BYTES:
        elements, size = 1, TYPE_BYTES[dtype]
    elif dtype in GGUF_TYPES:
        elements, size = GGUF_TYPES[dtype].elements, GGUF_TYPES[dtype].num_bytes
    else:
        raise ValueError(f"no such type: {dtype}")
    blocks, rest = divmod(math.prod(shape), elements)
    if rest:
        raise ValueError(f"{math.prod(shape)} numbers leave a block of {dtype} unfinished")
    return blocks * size


def layer_parts(tensors: Tensors) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Names cut at the longest suffix that fits."""
    layers: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name in tensors:
        layer, part = name, ""
        for suffix in SUFFIXES:
            if name.endswith("." + suffix):
                layer, part = name.removesuffix("." + suffix), suffix
                break
        layers.setdefault(layer, {})[part] = tensors[name]
    return layers


def read_layer(name: str, parts: Tensors, stated: StatedScheme) -> StoredLayer | None:
    """(bits, rows, columns, symmetric) from the layout, the rest from counting."""
    for tensor in parts.values():
        stored_bytes(*tensor)
    dtype, shape = parts.get("weight") or parts.get("") or ("F32", ())
    if dtype in GGUF_TYPES:
        kind = GGUF_TYPES[dtype]
        size = stored_bytes(dtype, shape)
        return StoredLayer(name, kind.bits, kind.group_size, kind.symmetric, math.prod(shape), size)
    form: tuple[int, int, int, bool | None]
    if "qweight" in parts:
        form = _words(name, parts, stated)
    elif "weight_packed" in parts:
        form = _packed(name, parts, stated)
    elif "weight.absmax" in parts:
        form = (4, 1, 2 * math.prod(shape), None)
    elif "weight" in parts and dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2"):
        form = (8, shape[0], shape[1], "weight_zero_point" not in parts)
    else:
        return None
    bits, rows, columns, symmetric = form
    scales = _num_scales(name, parts)
    candidates = [columns if stated.group_size == -1 else stated.group_size or 0, math.ceil(rows * columns / scales)]
    group_size = next(
        g for g in candidates if g == candidates[-1] or (g > 0 and math.ceil(columns / g) * rows == scales)
    )
    total = sum(stored_bytes(*tensor) for tensor in parts.values())
    return StoredLayer(name, bits, group_size, symmetric, rows * columns, total)


def _words(name: str, parts: Tensors, stated: StatedScheme) -> tuple[int, int, int, bool | None]:
    _num_scales(name, parts)
    (height, width), outputs = parts["qweight"][1], parts["scales"][1][1]
    if width != outputs:
        return width * 32 // outputs, outputs, height, stated.symmetric
    bits = height * 32 // parts["g_idx"][1][0] if "g_idx" in parts else _known_bits(name, stated)
    return bits, outputs, height * 32 // bits, stated.symmetric


def _packed(name: str, parts: Tensors, stated: StatedScheme) -> tuple[int, int, int, bool | None]:
    bits = _known_bits(name, stated)
    dtype, (rows, words) = parts["weight_packed"]
    columns = words * TYPE_BYTES[dtype] * 8 // bits
    if (stated.group_size or 0) > 0:
        columns = min(columns, _num_scales(name, parts) // rows * (stated.group_size or 0))
    return bits, rows, columns, "weight_zero_point" not in parts


def _known_bits(name: str, stated: StatedScheme) -> int:
    if not stated.bits:
        raise ValueError(f"{name}: nobody says how many bits its codes have")
    return stated.bits


def _num_scales(name: str, parts: Tensors) -> int:
    found = [math.prod(parts[part][1]) for part in SCALES if part in parts]
    if not found:
        raise ValueError(f"{name}: there are codes without scales")
    return found[0]
