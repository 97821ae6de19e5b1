"""Quantized blocks on disk, one file each, so that an interrupted run goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit.float_formats import Fp8Tensor, Mxfp4Tensor, Nf4Tensor, Nvfp4Tensor, QuantizedAbsmax
from labkit.quantized import QuantizedTensor
from solutions.quantization.methods import QuantizedBlock
from solutions.quantization.quantized_model import GgufTensor, QuantizedLinear

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (QuantizedTensor, Fp8Tensor, Nf4Tensor, QuantizedAbsmax, Mxfp4Tensor, Nvfp4Tensor, GgufTensor)
}


def save_block(path: Path, block: QuantizedBlock) -> None:
    """Write a block; the file appears whole or not at all."""
    tensors: dict[str, Tensor] = {f"float/{name}": tensor.contiguous() for name, tensor in block.floats.items()}
    layers = {
        name: {"activations": linear.activations, "stored": _take_apart(linear.stored, f"linear/{name}", tensors)}
        for name, linear in block.linears.items()
    }
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata={"layers": json.dumps(layers)})
    os.replace(unfinished, path)


def load_block(path: Path) -> QuantizedBlock:
    """Read a block.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            layers = json.loads(file.metadata()["layers"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        linears = {
            name: QuantizedLinear(_put_together(facts["stored"], f"linear/{name}", tensors), facts["activations"])
            for name, facts in layers.items()
        }
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and that layer is quantized again") from error
    floats = {name.removeprefix("float/"): tensor for name, tensor in tensors.items() if name.startswith("float/")}
    return QuantizedBlock(linears, floats)


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put the tensors of a dataclass aside under `name/field`, and return the rest."""
    facts: dict[str, Any] = {"kind": type(value).__name__}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            tensors[f"{name}/{field.name}"] = part.contiguous()
        elif dataclasses.is_dataclass(part):
            facts[field.name] = _take_apart(part, f"{name}/{field.name}", tensors)
        else:
            facts[field.name] = part
    return facts


def _put_together(facts: dict[str, Any], name: str, tensors: dict[str, Tensor]) -> Any:
    kind = _KINDS[facts["kind"]]
    parts: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if f"{name}/{field.name}" in tensors:
            parts[field.name] = tensors[f"{name}/{field.name}"]
        elif isinstance(facts[field.name], dict):
            parts[field.name] = _put_together(facts[field.name], f"{name}/{field.name}", tensors)
        else:
            parts[field.name] = facts[field.name]
    return kind(**parts)
