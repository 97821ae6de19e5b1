"""Read a quantized checkpoint back, whichever of the layouts it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from labkit.checkpoints.gguf_file import huggingface_name, open_gguf, read_config, undo_permutation
from labkit.config import ModelConfig
from labkit.decoder import weight_shapes
from labkit.linear_inputs import linear_names
from labkit.quantized import QuantizedTensor
from solutions.quantization import awq_layout, compressed_tensors_layout, gptq_layout
from solutions.quantization.exporting import GGUF
from solutions.quantization.gguf_blocks import BLOCK_TYPES
from solutions.quantization.quantized_model import GgufTensor, QuantizedLinear, QuantizedModel, dequantized

_READERS = {
    "compressed-tensors": compressed_tensors_layout.from_tensors,
    "gptq": gptq_layout.from_tensors,
    "awq": awq_layout.from_tensors,
}
_PARTS = {
    "compressed-tensors": ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}  # fmt: skip
"""The tensors of a layer that each layout's reader reads."""
_GGUF_KINDS = ("F32", "F16", "Q4_K", "Q6_K", *BLOCK_TYPES)


def load_quantized(path: Path) -> QuantizedModel:
    """Load a checkpoint.

    Args:
        path: a folder with `config.json` and `model.safetensors` in the compressed-tensors, GPTQ or AWQ layout; a
            folder with `model.gguf`; or a GGUF file.

    Raises:
        ValueError: no such checkpoint, one that is not quantized, or what is not read here.
    """
    if path.is_dir() and (path / GGUF).is_file():
        path = path / GGUF
    return _load_gguf(path) if path.suffix == ".gguf" else _load_folder(path)


def read_entries(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of `config.json` without, and its `quantization_config`.

    Raises:
        ValueError: no such file, or a model that is not quantized.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no checkpoint: it has neither config.json nor {GGUF}")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        quantization = entries.pop("quantization_config", None)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(quantization, dict):
        raise ValueError(f"{folder} holds a model that is not quantized; its config.json has no quantization_config")
    return entries, quantization


def _load_folder(folder: Path) -> QuantizedModel:
    entries, quantization = read_entries(folder)
    config = ModelConfig.from_huggingface(entries)
    method = quantization.get("quant_method")
    if method not in _READERS:
        raise ValueError(f"quantization method {method!r} is not read here, only {', '.join(_READERS)}")
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no readable safetensors file ({error})") from error
    try:
        linears = _READERS[method](quantization, tensors)
    except KeyError as error:
        raise ValueError(f"{folder} lacks {error}; the checkpoint is incomplete") from error
    floats = {name: tensors[name].to(torch.float32) for name in weight_shapes(config)
              if name in tensors and name.removesuffix(".weight") not in linears}  # fmt: skip
    _check_all_is_read(folder, tensors, {*floats, *(f"{name}.{part}" for name in linears for part in _PARTS[method])})
    for name, linear in linears.items():
        _check_scales(name, linear)
    return QuantizedModel(config, linears, floats)


def _check_all_is_read(folder: Path, tensors: Mapping[str, Tensor], read: set[str]) -> None:
    """Refuses tensors that would change the numbers and that nobody has read; biases of zeros change none."""
    unread = [name for name in sorted(tensors.keys() - read) if bool(tensors[name].any())]
    if unread:
        raise ValueError(f"{folder} holds {', '.join(unread[:3])}, which is not read here: the model would be another")


def _check_scales(name: str, linear: QuantizedLinear) -> None:
    """Refuses scales that are not one for each group of each row."""
    stored = linear.stored
    if isinstance(stored, QuantizedTensor):
        rows, columns = stored.codes.shape
        expected = (rows, -(-columns // stored.group_size))
        for part, given in (("scales", stored.scale), ("zero points", stored.zero_point)):
            if given is not None and tuple(given.shape) != expected:
                raise ValueError(f"{name} must have {part} of the shape {expected}, got {tuple(given.shape)}")


def _load_gguf(path: Path) -> QuantizedModel:
    reader = open_gguf(path)
    config = read_config(reader)
    names = set(linear_names(config))
    linears: dict[str, QuantizedLinear] = {}
    floats: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        kind, name = tensor.tensor_type.name, huggingface_name(tensor.name)
        if kind not in _GGUF_KINDS:
            raise ValueError(f"{path}: {tensor.name} has the type {kind}, which is not read here; a GGUF file that "
                             f"labkit.checkpoints.load reads as plain weights may have it")  # fmt: skip
        # The file is mapped read-only, and tensors outlive it.
        data = torch.from_numpy(tensor.data.copy())
        stored = GgufTensor(kind, undo_permutation(name, data, config))
        layer = name.removesuffix(".weight")
        if layer in names:
            linears[layer] = QuantizedLinear(stored)
        else:
            floats[name] = dequantized(stored)
    return QuantizedModel(config, linears, floats)
