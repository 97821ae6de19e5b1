"""Bounds are measured once for each machine and kept in the cache folder."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labkit.machine import facts
from labkit.paths import cache_dir
from labkit.probing import measuring
from labkit.probing.bounds import MachineBounds


def machine_bounds(
    device: str | None = None,
    *,
    quick: bool = False,
    again: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> MachineBounds:
    """The bounds of this machine: kept ones of the same machine, software and number of threads, or else measured.

    Args:
        device: `"cpu"` or `"cuda"`; None takes the GPU where there is one.
        quick: a measurement in a hurry will do. One at leisure is taken where it is kept.
        again: measure even if a result is kept.
        tell: called with what is measured next.

    Raises:
        ValueError: a device that isn't here, or too little free memory.
    """
    device = device or measuring.default_device()
    measuring.check_device(device)
    found = None if again else kept_bounds(device)
    if found is None or (found.quick and not quick):
        found = measuring.measure(device, quick=quick, tell=tell)
        _keep(_identity(device), found)
    return found


def kept_bounds(device: str) -> MachineBounds | None:
    """What is kept of this machine, without measuring; None if nothing is, or it can't be read."""
    try:
        return MachineBounds.from_json(_read()[_identity(device)])
    except (KeyError, ValueError):
        return None


def kept_path() -> Path:
    """The file that measurements are kept in."""
    return cache_dir() / "machine_bounds.json"


def _identity(device: str) -> str:
    """Names the machine, the software and the number of threads that a result holds for."""
    this = dataclasses.asdict(facts())
    threads = torch.get_num_threads() if device == "cpu" else 0
    return json.dumps({"node": platform.node(), "device": device, "threads": threads, **this}, sort_keys=True)


def _read() -> dict[str, Any]:
    try:
        kept = json.loads(kept_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in kept.items() if isinstance(value, dict)} if isinstance(kept, dict) else {}


def _keep(identity: str, bounds: MachineBounds) -> None:
    """Replaces the file in one step; where the cache can't be written, the result is only not remembered."""
    path = kept_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(_read() | {identity: bounds.to_json()}, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return
