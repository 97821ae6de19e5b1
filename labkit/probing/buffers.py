"""How large the last-level cache is, and what is large enough not to be served from it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import psutil
import torch

MIB = 2**20
TIMES_CACHE = 8
"""Of a buffer that is passed over again and again, the cache then keeps an eighth at most."""
_LEAST = {"cpu": 256 * MIB, "cuda": 1024 * MIB}
_SHARE_OF_MEMORY = 1 / 8
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def cache_bytes(device: str) -> int | None:
    """The last cache before memory, all of its parts that this process can use together; None if nobody tells.

    Args:
        device: `"cpu"` or `"cuda"`.
    """
    if device == "cuda":
        return getattr(torch.cuda.get_device_properties(0), "L2_cache_size", None) or None
    if platform.system() == "Darwin":
        return _of_darwin()
    return _of_linux(Path("/sys/devices/system/cpu"))


def buffer_bytes(cache: int | None, free: int, device: str) -> int:
    """Bytes of a buffer that measures memory and not a cache; a multiple of 1 MiB.

    Args:
        cache: bytes of the last-level cache, if known.
        free: bytes of free memory; at most an eighth of them is taken.
        device: `"cpu"` or `"cuda"`.

    Raises:
        ValueError: so little memory is free that a cache could hold much of the buffer.
    """
    wanted = max(_LEAST[device], TIMES_CACHE * (cache or 0))
    size = min(wanted, int(free * _SHARE_OF_MEMORY)) // MIB * MIB
    least = 2 * (cache or 32 * MIB)
    if size < least:
        raise ValueError(
            f"{free / MIB:.0f} MiB of memory are free, and a buffer of {size / MIB:.0f} MiB would partly be served "
            f"from a cache; close other programs until {least / _SHARE_OF_MEMORY / MIB:.0f} MiB are free"
        )
    return size


def free_bytes(device: str) -> int:
    """Memory that is free now."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available


def _of_linux(folder: Path) -> int | None:
    """The largest level, each of its parts once, over the cores that this process may run on."""
    parts: dict[int, dict[str, int]] = {}
    for core in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]:
        for cache in (folder / f"cpu{core}" / "cache").glob("index*"):
            try:
                level = int((cache / "level").read_text())
                size = re.fullmatch(r"(\d+)([KMG])", (cache / "size").read_text().strip())
                cores = (cache / "shared_cpu_list").read_text().strip()
            except (OSError, ValueError):
                continue
            if size:
                parts.setdefault(level, {})[cores] = int(size[1]) * _UNITS[size[2]]
    return sum(parts[max(parts)].values()) if parts else None


def _of_darwin() -> int | None:
    for name in ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize"):
        told = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()
        if told.isdigit() and int(told):
            return int(told)
    return None
