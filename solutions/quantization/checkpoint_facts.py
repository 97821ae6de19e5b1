"""What the audit of a checkpoint is told: its config, and type and shape of its tensors, without reading a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from labkit.checkpoint_audit import CheckpointAudit
from labkit.checkpoints.gguf_file import open_gguf
from solutions.quantization.audit import audit
from solutions.quantization.exporting import GGUF

Facts = tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]


def audit_checkpoint(path: Path) -> CheckpointAudit:
    """Audit a folder in Hugging Face's layout, or a GGUF file.

    Raises:
        ValueError: no checkpoint, or one that is damaged.
    """
    if path.is_dir() and (path / GGUF).is_file():
        path = path / GGUF
    return audit(*(_gguf_facts(path) if path.suffix == ".gguf" else _folder_facts(path)))


def _folder_facts(folder: Path) -> Facts:
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} holds no checkpoint: it has neither config.json nor {GGUF}")
    try:
        entries = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is not valid JSON ({error})") from error
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    tensors[name] = (part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no readable safetensors file ({error})") from error
    return entries, tensors


def _gguf_facts(path: Path) -> Facts:
    reader = open_gguf(path)
    short = {key: field.contents() for key, field in reader.fields.items() if len(field.data) <= 1}
    # GGUF names the fastest axis first.
    shapes = {
        tensor.name: (tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    }
    return short, shapes
