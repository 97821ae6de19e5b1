"""Task 10: what a checkpoint says of itself, what its tensors say, and what nobody can tell from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from labkit.checkpoint_audit import (
    HIGH_PRECISION,
    NONE_NEEDED,
    NOT_STATED,
    UNKNOWNS,
    CheckpointAudit,
    Contradiction,
    StatedScheme,
    StoredLayer,
)

from .stored_layers import Tensors, layer_parts, read_layer, stored_bytes

CALIBRATION_ENTRIES = ("calibration", "calibration_dataset", "dataset")
GGUF_CALIBRATION = "quantize.imatrix.dataset"


def audit(config: Mapping[str, Any], tensors: Tensors) -> CheckpointAudit:
    """Look at a checkpoint before trusting it.

    Args:
        config: the content of `config.json`, or the metadata of a GGUF file by key.
        tensors: (dtype, shape) of every tensor by its name, with the type names of safetensors or GGUF.

    Returns:
        The report. Where config and tensors disagree, the tensors are right, and the disagreement is listed. Bits per
        weight count every byte of every tensor.

    Raises:
        ValueError: no weights, an unknown type, or a layer that can't be read (see `read_layer`).

    Source: module section 4.5.
    """
    if not any(math.prod(shape) for _, shape in tensors.values()):
        raise ValueError(f"tensors must hold weights, got {len(tensors)} tensors without a number in them")
    # BEGIN SOLUTION
    stated = config.get("quantization_config") or {}
    layers, high, plain_weights = [], [], 0
    found: list[Contradiction] = []
    for name, parts in layer_parts(tensors).items():
        scheme = stated_scheme(config, name)
        layer = read_layer(name, parts, scheme)
        if layer is not None:
            layers.append(layer)
            found += _contradictions(layer, parts, scheme, stated)
            continue
        # Whole numbers in such tensors are positions or flags, not weights.
        for dtype, shape in parts.values():
            plain_weights += math.prod(shape) if dtype in HIGH_PRECISION else 0
            if dtype in HIGH_PRECISION and len(shape) > 1:
                high.append(name)
    format_name = _format(config, layers, tensors)
    if stated.get("quant_method") and not layers:
        found.append(Contradiction("quant_method", str(stated["quant_method"]), "no quantized matrix"))
    return CheckpointAudit(
        format=format_name,
        layers=tuple(layers),
        high_precision=tuple(dict.fromkeys(high)),
        num_weights=plain_weights + sum(layer.num_weights for layer in layers),
        num_bytes=sum(stored_bytes(*tensor) for tensor in tensors.values()),
        calibration=(calibration := _calibration(config, format_name)),
        contradictions=tuple(dict.fromkeys(found)),
        unknown=_unknown(layers, format_name, calibration),
    )
    # END SOLUTION


def stated_scheme(config: Mapping[str, Any], layer: str) -> StatedScheme:
    """What a config says of a layer's weights.

    GPTQ has `bits`, `group_size` and `sym` in its `quantization_config`, AWQ `bits`, `group_size` and `zero_point`
    (older files `w_bit` and `q_group_size`), compressed-tensors `config_groups`, each with `targets` and `weights`
    (`num_bits`, `group_size`, `symmetric`; strategy "channel" means a scale a row). Of several groups the one counts
    that names the layer, by its name or by a pattern behind "re:"; if none does, the first that names a class such as
    "Linear".

    Args:
        config: the content of `config.json`.
        layer: name of the layer.

    Returns:
        What is said, with None for the rest.
    """
    # BEGIN SOLUTION
    stated = config.get("quantization_config") or {}
    if groups := stated.get("config_groups"):
        weights = (_group_of(layer, list(groups.values())) or {}).get("weights") or {}
        size = -1 if weights.get("strategy") == "channel" else weights.get("group_size")
        return StatedScheme(weights.get("num_bits"), size, weights.get("symmetric"))
    symmetric = stated.get("sym")
    if symmetric is None and stated.get("zero_point") is not None:
        symmetric = not stated["zero_point"]
    bits, size = stated.get("bits", stated.get("w_bit")), stated.get("group_size", stated.get("q_group_size"))
    return StatedScheme(bits, size, symmetric)
    # END SOLUTION


# BEGIN SOLUTION
def _group_of(layer: str, groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The group that a layer belongs to."""

    def names(target: str) -> bool:
        return target == layer or (target.startswith("re:") and re.match(target[3:], layer) is not None)

    for group in groups:
        if any(names(target) for target in group.get("targets", [])):
            return group
    of_class = (g for g in groups if any("." not in t and not t.startswith("re:") for t in g.get("targets", [])))
    return next(of_class, None)


def _contradictions(
    layer: StoredLayer, parts: Tensors, scheme: StatedScheme, stated: Mapping[str, Any]
) -> list[Contradiction]:
    """Where a layer's tensors are not what the config says."""
    found = []
    if scheme.bits is not None and scheme.bits != layer.bits:
        found.append(Contradiction("bits", str(scheme.bits), str(layer.bits)))
    if scheme.group_size is not None and scheme.group_size > 0 and scheme.group_size != layer.group_size:
        found.append(Contradiction("group_size", str(scheme.group_size), str(layer.group_size)))
    if scheme.symmetric is not None and layer.symmetric is not None and scheme.symmetric != layer.symmetric:
        found.append(Contradiction("symmetric", str(scheme.symmetric), str(layer.symmetric)))
    method = stated.get("quant_method")
    layout = _layout(parts)
    if layout in ("gptq", "awq") and method in ("gptq", "awq") and method != layout:
        found.append(Contradiction("quant_method", method, layout))
    kept = stated.get("ignore") or stated.get("modules_to_not_convert") or []
    if _group_of(layer.name, [{"targets": [k for k in kept if "." in k or k == layer.name or k.startswith("re:")]}]):
        found.append(Contradiction("ignore", f"{layer.name} is left alone", "it is quantized"))
    return found


def _layout(parts: Tensors) -> str:
    """The layout of a quantized layer's tensors."""
    if "qweight" in parts:
        return "awq" if parts["qweight"][1][1] < parts["scales"][1][-1] else "gptq"
    if "weight.absmax" in parts or "SCB" in parts:
        return "bitsandbytes"
    return "fp8" if parts.get("weight", ("", ()))[0].startswith("F8") else "compressed-tensors"


def _format(config: Mapping[str, Any], layers: list[StoredLayer], tensors: Tensors) -> str:
    if "general.architecture" in config:
        return "gguf"
    if not layers:
        return "plain"
    method = (config.get("quantization_config") or {}).get("quant_method")
    layout = _layout(layer_parts(tensors)[layers[0].name])
    return "compressed-tensors" if method == "compressed-tensors" else layout


def _calibration(config: Mapping[str, Any], format_name: str) -> str:
    """The data as the checkpoint names them; a list is of texts, which would fill pages."""
    stated = config.get("quantization_config") or {}
    for source in (stated, config):
        for entry in (*CALIBRATION_ENTRIES, GGUF_CALIBRATION):
            value = source.get(entry)
            if isinstance(value, (list, tuple)) and value:
                return f"{len(value)} texts of the maker's own"
            if value:
                return str(value)
    return NONE_NEEDED if format_name in ("bitsandbytes", "plain") else NOT_STATED


def _unknown(layers: list[StoredLayer], format_name: str, calibration: str) -> tuple[str, ...]:
    """What the report has to leave open."""
    open_questions = set()
    if layers and calibration == NOT_STATED:
        open_questions.add("calibration")
    if layers and format_name != "bitsandbytes":
        open_questions.add("method")
    if format_name in ("gptq", "awq") and any(layer.symmetric is None for layer in layers):
        open_questions.add("symmetric")
    return tuple(key for key in UNKNOWNS if key in open_questions)


# END SOLUTION
