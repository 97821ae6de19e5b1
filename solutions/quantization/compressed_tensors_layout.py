"""The compressed-tensors layout, which vLLM and transformers load.

Integer weights alone are "pack-quantized": `weight_packed` holds the unsigned codes as a stream of bits along each row,
with signed codes raised by 2^(bits − 1); `weight_scale` is `[out, groups]`; a zero point is raised alike and packed
down the columns. W8A8 is "int-quantized", `weight` in int8; FP8 is "float-quantized", `weight` in float8_e4m3fn; both
take activations with a scale for each token, found when the model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.float_formats import Fp8Tensor
from labkit.quantized import QuantizedTensor
from solutions.quantization.packing import pack_words, unpack_words
from solutions.quantization.quantized_model import QuantizedLinear, Stored

Facts = dict[str, Any]


def scheme(stored: Stored, activations: str) -> tuple[str, Facts]:
    """The name of the format and its `config_groups` entry, apart from targets.

    Raises:
        ValueError: a kind of weight that this layout does not hold here.
    """
    token = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    if isinstance(stored, QuantizedTensor) and activations == "int8":
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
        return "int-quantized", {"weights": weights, "input_activations": token | {"type": "int"}}
    if isinstance(stored, Fp8Tensor) and activations == "fp8":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        return "float-quantized", {"weights": weights, "input_activations": token | {"type": "float"}}
    if isinstance(stored, QuantizedTensor) and activations == "float":
        weights = {
            "num_bits": stored.bits, "type": "int", "symmetric": stored.zero_point is None, "strategy": "group",
            "group_size": stored.group_size, "dynamic": False,
        }  # fmt: skip
        return "pack-quantized", {"weights": weights, "input_activations": None}
    raise ValueError(
        f"compressed-tensors holds here integer codes, W8A8 and FP8, not {type(stored).__name__} with {activations} "
        f"activations; this method is for comparison only"
    )


def quantization_config(stored: Stored, activations: str) -> Facts:
    """The `quantization_config` of `config.json`, for a model whose linear layers are all of this kind."""
    name, group = scheme(stored, activations)
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"targets": ["Linear"], "output_activations": None, "format": name}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def to_tensors(name: str, linear: QuantizedLinear) -> dict[str, Tensor]:
    """The tensors of one layer.

    Raises:
        ValueError: a kind of weight that this layout does not hold here.
    """
    stored = linear.stored
    kind, _ = scheme(stored, linear.activations)
    if isinstance(stored, Fp8Tensor):
        codes = stored.codes.view(torch.float8_e4m3fn)
        return {f"{name}.weight": codes, f"{name}.weight_scale": stored.scale.to(torch.float32)}
    assert isinstance(stored, QuantizedTensor)
    scale = stored.scale.to(torch.float16)
    if kind == "int-quantized":
        return {f"{name}.weight": stored.codes.to(torch.int8), f"{name}.weight_scale": scale}
    middle = 2 ** (stored.bits - 1) if stored.zero_point is None else 0
    tensors = {
        f"{name}.weight_packed": pack_words(stored.codes.to(torch.int64) + middle, stored.bits),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(list(stored.codes.shape), dtype=torch.int64),
    }
    if stored.zero_point is not None:
        packed = pack_words(stored.zero_point.T.contiguous(), stored.bits).T.contiguous()
        tensors[f"{name}.weight_zero_point"] = packed
    return tensors


def from_tensors(config: Facts, tensors: Mapping[str, Tensor]) -> dict[str, QuantizedLinear]:
    """The layers of a checkpoint in this layout.

    Args:
        config: the `quantization_config`.
        tensors: all of the checkpoint.

    Raises:
        ValueError: more than one scheme, or one that is not read here.
    """
    groups = list(config["config_groups"].values())
    kind = groups[0].get("format") or config["format"]
    if len(groups) != 1 or kind not in ("pack-quantized", "int-quantized", "float-quantized"):
        raise ValueError(f"compressed-tensors with {len(groups)} schemes of format {kind!r} is not read here")
    facts = groups[0]["weights"]
    found = {}
    for key, scale in tensors.items():
        if not key.endswith(".weight_scale"):
            continue
        name, scale = key.removesuffix(".weight_scale"), scale.to(torch.float32)
        if kind == "float-quantized":
            codes = tensors[f"{name}.weight"].view(torch.uint8)
            found[name] = QuantizedLinear(Fp8Tensor(codes, scale, "e4m3", 1, codes.shape[1]), "fp8")
        elif kind == "int-quantized":
            codes = tensors[f"{name}.weight"]
            found[name] = QuantizedLinear(QuantizedTensor(codes, scale, None, 8, codes.shape[1]), "int8")
        else:
            found[name] = QuantizedLinear(_unpack(name, facts, scale, tensors))
    return found


def _unpack(name: str, facts: Facts, scale: Tensor, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    bits = int(facts["num_bits"])
    rows, columns = tensors[f"{name}.weight_shape"].tolist()
    codes = unpack_words(tensors[f"{name}.weight_packed"], columns, bits)
    group_size = int(facts["group_size"])
    if facts["symmetric"]:
        signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
        return QuantizedTensor(signed, scale, None, bits, group_size)
    zero_point = unpack_words(tensors[f"{name}.weight_zero_point"].T.contiguous(), rows, bits).T.contiguous()
    return QuantizedTensor(codes, scale, zero_point, bits, group_size)
