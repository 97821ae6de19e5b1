"""Bounds are measured once for each machine and kept in the cache folder.

What a busy machine could do besides is no bound of it. It serves for as long as the machine is busy, and then is
measured anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from labkit.machine import facts
from labkit.paths import cache_dir
from labkit.probing import measuring
from labkit.probing.bounds import MachineBounds

_MOST_LOAD = 0.75
"""Processes that want a core, for each core: with more, a machine is busy."""


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
        name = _identity(device, is_busy=_is_busy())
        found = measuring.measure(device, quick=quick, tell=tell)
        _keep(name, found)
    return found


def kept_bounds(device: str) -> MachineBounds | None:
    """What is kept of this machine, without measuring; None if nothing is, or it can't be read."""
    kept = _read()
    for is_busy in (False, True) if _is_busy() else (False,):
        with suppress(KeyError, ValueError):
            return MachineBounds.from_json(kept[_identity(device, is_busy)])
    return None


def kept_path() -> Path:
    """The file that measurements are kept in."""
    return cache_dir() / "machine_bounds.json"


def _is_busy() -> bool:
    """Whether others compute here; where the system doesn't tell, nobody does."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > _MOST_LOAD * (os.cpu_count() or 1)


def _identity(device: str, is_busy: bool) -> str:
    """Names the machine, the software and the number of threads that a result holds for."""
    this = dataclasses.asdict(facts())
    threads = torch.get_num_threads() if device == "cpu" else 0
    name = {"node": platform.node(), "device": device, "threads": threads, **this}
    return json.dumps(name | ({"busy": True} if is_busy else {}), sort_keys=True)


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
