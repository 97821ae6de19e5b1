"""Tells a checkpoint that stores codes from one that stores plain weights."""

from __future__ import annotations

import json
from pathlib import Path

GGUF = "model.gguf"
"""What `solutions.quantization` calls the file in a folder that it writes."""


def stored_file(name: str) -> Path | None:
    """The GGUF file or the folder of codes that a name stands for; None if it stands for plain weights or nothing."""
    path = Path(name).expanduser()
    if not name or path.suffix == ".gguf":
        return path if path.is_file() else None
    if (path / GGUF).is_file():
        return path / GGUF
    try:
        entries = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return path if isinstance(entries, dict) and entries.get("quantization_config") else None
