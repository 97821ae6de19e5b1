"""Pieces of finished work on disk: a run that was broken off goes on behind the last whole one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """A file that is there as a whole or not at all.

    Args:
        path: of the file; its folder is made.
        tensors: by name.
        about: what they are, kept as JSON in the header.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, unfinished, metadata={"about": json.dumps(about, sort_keys=True)})
    unfinished.replace(path)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` has put there; tensors are mapped, not copied, until they are used.

    Raises:
        ValueError: the file is missing, damaged, or none of ours.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged or of another program: {error}") from error
