"""Write a quantized model in a layout that other engines read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from labkit.checkpoint_audit import NONE_NEEDED
from labkit.checkpoints.gguf_file import open_gguf
from labkit.checkpoints.gguf_tokenizer import read_tokenizer
from labkit.quantized import QuantizedTensor
from labkit.tokenizer import write_tokenizer
from solutions.quantization import awq_layout, compressed_tensors_layout, gptq_layout
from solutions.quantization.gguf_blocks import encode_codes
from solutions.quantization.gguf_writer import write_gguf
from solutions.quantization.methods import Settings, gguf_tensor
from solutions.quantization.quantized_model import GgufTensor, QuantizedLinear, QuantizedModel

FORMATS = ("compressed-tensors", "gptq", "gptq_v2", "awq", "gguf")
REPORT = "quantization.json"
GGUF = "model.gguf"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
                    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """Where a model came from, for its tokenizer and for the record.

    Args:
        source: a folder in Hugging Face's layout or a `.gguf` file.
        gguf: a GGUF file of the same model, whose tokenizer and metadata a GGUF export carries over; None if there is
            none.
        method: that quantized it.
        settings: of the method.
        calibration: name of the calibration text, None for methods without.
    """

    source: Path
    gguf: Path | None
    method: str
    settings: Settings
    calibration: str | None


def export(model: QuantizedModel, format: str, folder: Path, origin: Origin, head_bits: int = 16) -> None:
    """Write a checkpoint.

    Args:
        model: what to write.
        format: one of `FORMATS`.
        folder: where to; made if it is not there.
        origin: of the model.
        head_bits: of the embedding and the head: 16, or in GGUF 8.

    Raises:
        ValueError: a format that cannot hold this, or no tokenizer for a GGUF file. Nothing was written then.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if head_bits not in (16, 8) or (head_bits == 8 and format != "gguf"):
        raise ValueError(f"the head has 16 bits, in GGUF also 8 on request; got {head_bits} for {format}")
    write = _gguf_writer(model, folder, origin, head_bits) if format == "gguf" else _folder_writer(
        model, format, folder, origin)  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write()
    report = {
        "method": origin.method,
        "format": format,
        "bits": _bits(model),
        "group_size": origin.settings.group_size,
        "bits_per_weight": round(model.bits_per_weight(), 4),
        "bytes": (folder / (GGUF if format == "gguf" else "model.safetensors")).stat().st_size,
        "calibration": origin.calibration,
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _bits(model: QuantizedModel) -> list[int]:
    return sorted({q.stored.bits for q in model.linears.values() if isinstance(q.stored, QuantizedTensor)})


def _folder_writer(model: QuantizedModel, format: str, folder: Path, origin: Origin) -> Callable[[], None]:
    first = next(iter(model.linears.values()))
    pack, config = _layout(format, first, origin)
    tensors = {name: tensor.to(torch.float16).contiguous() for name, tensor in model.floats.items()}
    for name, linear in model.linears.items():
        tensors |= pack(name, linear)
    # Outside of `quantization_config`, whose readers may refuse entries that they don't know.
    facts = {"dtype": "float16", "calibration": origin.calibration or NONE_NEEDED, "quantization_config": config}
    entries = model.config.to_huggingface() | facts

    def write() -> None:
        # config.json comes last: a folder without it is no checkpoint.
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        _write_tokenizer(origin.source, folder)
        if format.startswith("gptq"):
            (folder / "quantize_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")

    return write


Pack = Callable[[str, QuantizedLinear], dict[str, Tensor]]


def _layout(format: str, first: QuantizedLinear, origin: Origin) -> tuple[Pack, dict[str, Any]]:
    """How to pack a layer, and the `quantization_config`."""
    if format == "compressed-tensors":
        config = compressed_tensors_layout.quantization_config(first.stored, first.activations)
        return compressed_tensors_layout.to_tensors, config
    if format == "awq":
        return awq_layout.to_tensors, awq_layout.quantization_config(
            gptq_layout.check_integer("the model", first, (4,), "AWQ"))  # fmt: skip
    version = 1 if format == "gptq" else 2
    q = gptq_layout.check_integer("the model", first, gptq_layout.BITS, "GPTQ")
    config = gptq_layout.quantization_config(q, version, origin.settings.damping, origin.settings.act_order)
    return lambda name, linear: gptq_layout.to_tensors(name, linear, version), config


def _gguf_writer(model: QuantizedModel, folder: Path, origin: Origin, head_bits: int) -> Callable[[], None]:
    if origin.gguf is None:
        raise ValueError(
            f"a GGUF export carries over the tokenizer of a GGUF file, and {origin.source} has none; give the model as "
            f"a .gguf file, or choose another --format"
        )
    tokenizer_from = origin.gguf
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in model.floats.items():
        matrix = "F16" if head_bits == 16 else "Q8_0"
        tensors[name] = gguf_tensor(tensor, matrix if tensor.ndim == 2 else "F32")
    for name, linear in model.linears.items():
        tensors[f"{name}.weight"] = _gguf_linear(name, linear)
    most = max(kinds := [tensors[f"{name}.weight"].kind for name in model.linears], key=kinds.count)
    file_type = origin.method.upper() if origin.method.upper() in ("Q4_K", "Q6_K") else most
    text = origin.calibration or NONE_NEEDED
    return lambda: write_gguf(folder / GGUF, model.config, tensors, tokenizer_from, file_type, text)


def _gguf_linear(name: str, linear: QuantizedLinear) -> GgufTensor:
    if isinstance(linear.stored, GgufTensor):
        return linear.stored
    if isinstance(linear.stored, QuantizedTensor) and linear.activations == "float":
        return GgufTensor(*encode_codes(linear.stored))
    raise ValueError(f"{name}: GGUF holds integer codes and its own block types, not {type(linear.stored).__name__}")


def _write_tokenizer(source: Path, folder: Path) -> None:
    if source.suffix == ".gguf" and source.is_file():
        write_tokenizer(folder, *read_tokenizer(open_gguf(source)))
        return
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
