"""What this machine is and how fast it reads memory, which bounds the speed of decoding."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from labkit.paths import cache_dir

# Far beyond any last-level cache, so that every pass comes from memory.
_BUFFER_BYTES = 256 * 2**20
_REPEATS = 9


@dataclass(frozen=True)
class Gpu:
    """The first CUDA device.

    Args:
        name: as the driver reports it.
        memory_bytes: its whole memory.
        compute_capability: for example `"12.0"` for sm_120.
    """

    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True)
class Machine:
    """What a measurement depends on.

    Args:
        cpu: model name of the processor.
        physical_cores: cores, or 0 if the system does not say.
        logical_cores: hardware threads that this process may use.
        memory_bytes: main memory.
        system: operating system and its release.
        python: version.
        torch: version.
        triton: version, or None if it is not installed.
        gpu: the first CUDA device, or None.
    """

    cpu: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    triton: str | None
    gpu: Gpu | None


def facts() -> Machine:
    """Return what this machine is."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(
        cpu=_cpu_model(),
        physical_cores=psutil.cpu_count(logical=False) or 0,
        logical_cores=allowed or 1,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        gpu=_gpu(),
    )


def read_bandwidth(device: str = "cpu", *, again: bool = False) -> float:
    """Return how fast this machine reads memory, measured once per machine and kept in the cache folder.

    An array far larger than the caches is summed, which reads every number once and does next to no arithmetic. It is
    the ceiling of decoding; matrix times vector may stay below it.

    Args:
        device: `"cpu"` or `"cuda"`.
        again: measure even if a result is kept.

    Returns:
        Bytes per second, median of several passes; on a CPU with torch's current number of threads.

    Raises:
        ValueError: another device, or `"cuda"` where torch sees none.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use 'cpu'")
    key = _identity(device)
    kept = _read_kept()
    if again or key not in kept:
        kept[key] = _measure(device)
        _keep(kept)
    return kept[key]


def _measure(device: str) -> float:
    numbers = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    seconds = []
    # The first pass maps pages and starts threads; it is not counted.
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        numbers.sum()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return _BUFFER_BYTES / statistics.median(seconds[1:])


def _identity(device: str) -> str:
    """Name the machine, the software and the number of threads that a result holds for."""
    this = dataclasses.asdict(facts())
    threads = torch.get_num_threads() if device == "cpu" else 0
    return json.dumps({"node": platform.node(), "device": device, "threads": threads, **this}, sort_keys=True)


def _kept_path() -> Path:
    return cache_dir() / "read_bandwidth.json"


def _read_kept() -> dict[str, float]:
    try:
        kept = json.loads(_kept_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {key: value for key, value in kept.items() if isinstance(value, float) and value > 0}


def _keep(kept: dict[str, float]) -> None:
    """Replace the file in one step; where the cache cannot be written, the result is only not remembered."""
    path = _kept_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(kept, file, indent=2)
        os.replace(file.name, path)
    except OSError:
        return


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(properties.name, properties.total_memory, f"{properties.major}.{properties.minor}")
