"""What this machine is; what it can do is measured by `labkit.probing`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch


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
