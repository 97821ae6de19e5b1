"""Says what this machine has, what it lacks, and what to do about each: `python -m labkit.doctor`.

Runs on the standard library alone, so that it can be asked before anything is set up.
"""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from labkit.paths import repo_root

if TYPE_CHECKING:
    from labkit.machine import Machine

GIB = 2**30
MINIMUM_PYTHON = (3, 11)
NEEDED_DISK_BYTES = 4 * GIB
NEEDED_MEMORY_BYTES = 3 * GIB


class State(Enum):
    """How a part of the machine was found."""

    OK = "ok"
    LIMITED = "limited"
    BROKEN = "broken"
    NOT_VERIFIED = "*not verified here*"


@dataclass(frozen=True)
class Finding:
    """What was found of one part, and what to do about it.

    Args:
        part: Such as ``"torch"``.
        state: BROKEN means that the labs cannot run; LIMITED, that something beside them cannot.
        detail: What was found.
        advice: What to do, empty if nothing.
    """

    part: str
    state: State
    detail: str
    advice: str = ""


def python_finding() -> Finding:
    """Check the interpreter and whether it is that of the workbook's environment."""
    version = platform.python_version()
    detail = f"{version} at {sys.executable}"
    if sys.version_info < MINIMUM_PYTHON:
        return Finding("Python", State.BROKEN, detail, "3.11 or later is needed: make setup PYTHON=python3.12")
    if sys.prefix != str(repo_root() / ".venv"):
        return Finding("Python", State.LIMITED, detail, "not the workbook's environment; run: make setup")
    return Finding("Python", State.OK, detail)


def package_finding(name: str, on: str = "") -> Finding:
    """Check that a package imports.

    Args:
        name: Its name, for import and for its metadata.
        on: The only ``sys.platform`` that has the package, any if empty.
    """
    if on and sys.platform != on:
        return Finding(name, State.LIMITED, f"none for {sys.platform}", "what uses it runs on Linux or in WSL2")
    try:
        importlib.import_module(name)
        return Finding(name, State.OK, importlib.metadata.version(name))
    except ImportError as error:
        return Finding(name, State.BROKEN, str(error), "run: make setup")


def gpu_finding() -> Finding:
    """Check for a GPU that torch can use; the labs run without one."""
    machine = machine_facts()
    if machine is None:
        return Finding("GPU", State.NOT_VERIFIED, "torch is missing")
    if machine.gpu is not None:
        gpu = machine.gpu
        capability = f"compute capability {gpu.compute_capability}"
        return Finding("GPU", State.OK, f"{gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB, {capability}")
    if shutil.which("nvidia-smi"):
        advice = "if torch above is a CPU build, run: make clean-all setup; else the driver may be too old for it"
        return Finding("GPU", State.LIMITED, "torch cannot use the one that this machine seems to have", advice)
    return Finding("GPU", State.NOT_VERIFIED, "none found", "none is needed: the labs run on the CPU")


def machine_facts() -> Machine | None:
    """What labkit knows of this machine, or None before what it asks is installed."""
    try:
        from labkit.machine import facts
    except ImportError:
        return None
    return facts()


def sandbox_finding() -> Finding:
    """Try whether bubblewrap can make a sandbox of its own namespaces on this machine."""
    if sys.platform != "linux":
        return Finding("sandbox", State.LIMITED, f"none for {sys.platform}", "grade on Linux or in WSL2")
    program = shutil.which("bwrap")
    if program is None:
        return Finding("sandbox", State.LIMITED, "bubblewrap is missing", "run: sudo apt-get install bubblewrap")
    command = [program, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("sandbox", State.LIMITED, f"bubblewrap does not start: {error}", "grading needs it to work")
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
        return Finding("sandbox", State.LIMITED, f"bubblewrap fails: {reason}", user_namespace_advice())
    return Finding("sandbox", State.OK, f"{program}, with user, process and network namespaces")


def user_namespace_advice() -> str:
    """Say which setting of this kernel forbids user namespaces, and how to allow them."""
    settings = {"kernel.apparmor_restrict_unprivileged_userns": "1", "kernel.unprivileged_userns_clone": "0"}
    settings |= {"user.max_user_namespaces": "0"}
    allowed = {"1": "0", "0": "1"}
    for name, forbidding in settings.items():
        try:
            with open("/proc/sys/" + name.replace(".", "/"), encoding="ascii") as file:
                value = file.read().strip()
        except OSError:
            continue
        if value == forbidding:
            new = "10000" if name.startswith("user.") else allowed[forbidding]
            return f"the kernel forbids user namespaces; run: sudo sysctl -w {name}={new}"
    return "containers often forbid namespaces: grade on the host, or read `python -m grader grade --help`"


def libseccomp_finding() -> Finding:
    """Check for the library behind the sandbox's filter of system calls."""
    if sys.platform != "linux":
        return Finding("libseccomp", State.LIMITED, f"none for {sys.platform}", "grade on Linux or in WSL2")
    library = ctypes.util.find_library("seccomp")
    if library is None:
        return Finding("libseccomp", State.LIMITED, "missing", "run: sudo apt-get install libseccomp2")
    return Finding("libseccomp", State.OK, library)


def model_finding() -> Finding:
    """Check for the converted bundled model in the cache."""
    try:
        from labkit.checkpoints import CheckpointError, bundled_folder
    except ImportError as error:
        return Finding("model cache", State.NOT_VERIFIED, f"what reads it does not import: {error}", "run: make setup")
    try:
        return Finding("model cache", State.OK, str(bundled_folder()))
    except CheckpointError as error:
        return Finding("model cache", State.LIMITED, str(error), "run: make setup")


def disk_finding() -> Finding:
    """Check the free space where the workbook lies."""
    free = shutil.disk_usage(repo_root()).free
    detail = f"{free / GIB:.1f} GiB free"
    if free < NEEDED_DISK_BYTES and not (repo_root() / ".venv").exists():
        return Finding("disk", State.LIMITED, detail, f"set-up takes about {NEEDED_DISK_BYTES / GIB:.0f} GiB")
    return Finding("disk", State.OK, detail)


def memory_finding() -> Finding:
    """Check processor and memory."""
    machine = machine_facts()
    if machine is None:
        return Finding("memory", State.NOT_VERIFIED, "what asks for it is missing")
    detail = f"{machine.memory_bytes / GIB:.1f} GiB beside {machine.logical_cores} cores of {machine.cpu}"
    if machine.memory_bytes < NEEDED_MEMORY_BYTES:
        return Finding("memory", State.LIMITED, detail, "close other programs before the demo and the full suite")
    return Finding("memory", State.OK, detail)


def findings() -> list[Finding]:
    """Look at every part.

    Returns:
        One finding a part, in the order of importance; a check that fails itself is a finding too.
    """
    checks: dict[str, Callable[[], Finding]] = {
        "Python": python_finding,
        "torch": lambda: package_finding("torch"),
        "triton": lambda: package_finding("triton", on="linux"),
        "transformers": lambda: package_finding("transformers"),
        "pytest": lambda: package_finding("pytest"),
        "GPU": gpu_finding,
        "memory": memory_finding,
        "disk": disk_finding,
        "model cache": model_finding,
        "sandbox": sandbox_finding,
        "libseccomp": libseccomp_finding,
    }
    found = []
    for part, check in checks.items():
        try:
            found.append(check())
        except Exception as error:  # a broken library may raise anything, and the other parts are still to be told
            found.append(Finding(part, State.NOT_VERIFIED, f"the check failed: {type(error).__name__}: {error}"))
    return found


def main() -> int:
    """Print the findings; return 0 if the labs can run, else 1."""
    found = findings()
    width = max(len(finding.part) for finding in found)
    state_width = max(len(finding.state.value) for finding in found)
    for finding in found:
        print(f"{finding.part:<{width}}  {finding.state.value:<{state_width}}  {finding.detail}")
        if finding.advice:
            print(f"{'':<{width}}  {'':<{state_width}}  → {finding.advice}")
    broken = [finding.part for finding in found if finding.state is State.BROKEN]
    limited = [finding.part for finding in found if finding.state is State.LIMITED]
    if broken:
        print(f"\nThe labs cannot run yet: {', '.join(broken)}. Begin with the first arrow above.")
        return 1
    print("\nThe labs can run." + (f" Limited: {', '.join(limited)}." if limited else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
