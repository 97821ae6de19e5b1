"""Facts first, in lists of their own; the report at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from labkit.checkpoint_audit import HIGH_PRECISION, CheckpointAudit, Contradiction, StatedScheme

from .stored_layers import Tensors, layer_parts, read_layer, stored_bytes


def audit(config: Mapping[str, Any], tensors: Tensors) -> CheckpointAudit:
    """Read all layers, then ask one question after another."""
    if sum(math.prod(shape) for _, shape in tensors.values()) == 0:
        raise ValueError("there is nothing to audit")
    settings: Mapping[str, Any] = config.get("quantization_config") or {}
    grouped = layer_parts(tensors)
    schemes = {name: stated_scheme(config, name) for name in grouped}
    read = {name: read_layer(name, parts, schemes[name]) for name, parts in grouped.items()}
    layers = {name: layer for name, layer in read.items() if layer is not None}
    floats = [
        (name, shape)
        for name, parts in grouped.items()
        if name not in layers
        for dtype, shape in parts.values()
        if dtype in HIGH_PRECISION
    ]
    layouts = {name: _layout(grouped[name]) for name in layers}
    method = settings.get("quant_method")
    if "general.architecture" in config:
        kind = "gguf"
    elif not layers:
        kind = "plain"
    else:
        kind = method if method == "compressed-tensors" else next(iter(layouts.values()))
    seen: list[Contradiction] = []
    for name, layer in layers.items():
        scheme = schemes[name]
        pairs = [("bits", scheme.bits, layer.bits)]
        if (scheme.group_size or 0) > 0:
            pairs.append(("group_size", scheme.group_size, layer.group_size))
        if layer.symmetric is not None:
            pairs.append(("symmetric", scheme.symmetric, layer.symmetric))
        if {method, layouts[name]} == {"gptq", "awq"}:
            pairs.append(("quant_method", method, layouts[name]))
        seen += [Contradiction(e, str(a), str(b)) for e, a, b in pairs if a is not None and a != b]
        kept = settings.get("ignore") or settings.get("modules_to_not_convert") or ()
        if any(_names(target, name) for target in kept):
            seen.append(Contradiction("ignore", f"{name} stays as it is", "codes"))
    if method and not layers:
        seen.append(Contradiction("quant_method", method, "no quantized matrix"))
    unique = [c for index, c in enumerate(seen) if c not in seen[:index]]
    calibration = _calibration(settings, config)
    if calibration is None:
        calibration = "none needed" if kind in ("plain", "bitsandbytes") else "not stated"
    doubts = {
        "calibration": bool(layers) and calibration == "not stated",
        "method": bool(layers) and kind != "bitsandbytes",
        "symmetric": kind in ("gptq", "awq") and any(layer.symmetric is None for layer in layers.values()),
    }
    return CheckpointAudit(
        kind,
        tuple(layers.values()),
        tuple(name for name, shape in floats if len(shape) >= 2),
        sum(math.prod(shape) for _, shape in floats) + sum(layer.num_weights for layer in layers.values()),
        sum(stored_bytes(dtype, shape) for dtype, shape in tensors.values()),
        calibration,
        tuple(unique),
        tuple(doubt for doubt, holds in doubts.items() if holds),
    )


def stated_scheme(config: Mapping[str, Any], layer: str) -> StatedScheme:
    """Rank the groups by how closely they name the layer."""
    settings: Mapping[str, Any] = config.get("quantization_config") or {}
    if "config_groups" in settings:
        ranked = sorted(settings["config_groups"].values(), key=lambda group: _rank(group["targets"], layer))
        if not ranked or _rank(ranked[0]["targets"], layer) > 1:
            return StatedScheme()
        weights = ranked[0].get("weights") or {}
        whole = weights.get("strategy") == "channel"
        return StatedScheme(
            weights.get("num_bits"), -1 if whole else weights.get("group_size"), weights.get("symmetric")
        )
    symmetric = settings.get("sym")
    if symmetric is None and "zero_point" in settings:
        symmetric = settings["zero_point"] is False
    size = settings["group_size"] if "group_size" in settings else settings.get("q_group_size")
    return StatedScheme(settings["bits"] if "bits" in settings else settings.get("w_bit"), size, symmetric)


def _rank(targets: list[str], layer: str) -> int:
    if any(_names(target, layer) for target in targets):
        return 0
    return 1 if any(target.isidentifier() for target in targets) else 2


def _names(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        return bool(re.match(target.removeprefix("re:"), layer))
    return target == layer


def _layout(parts: Tensors) -> str:
    if "qweight" in parts:
        return "gptq" if parts["qweight"][1][1] == parts["scales"][1][1] else "awq"
    if {"weight.absmax", "SCB"} & set(parts):
        return "bitsandbytes"
    if "weight" in parts and parts["weight"][0] in ("F8_E4M3", "F8_E5M2"):
        return "fp8"
    return "compressed-tensors"


def _calibration(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    keys = ("calibration", "calibration_dataset", "dataset", "quantize.imatrix.dataset")
    stated = [source[key] for source in (settings, config) for key in keys if source.get(key)]
    if not stated:
        return None
    return f"{len(stated[0])} texts of the maker's own" if isinstance(stated[0], (list, tuple)) else str(stated[0])
