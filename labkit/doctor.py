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
from collections.abc import Callable, Sequence
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


def torch_finding() -> Finding:
    """Check that torch imports, and say for what it was built."""
    finding = package_finding("torch")
    if finding.state is not State.OK:
        return finding
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU alone"
    return Finding("torch", State.OK, f"{finding.detail}, {build}")


def triton_finding() -> Finding:
    """Check that Triton imports, and say how kernels run here."""
    finding = package_finding("triton", on="linux")
    machine = machine_facts()
    if finding.state is not State.OK or machine is None:
        return finding
    how = "run on the GPU" if machine.gpu else "run in the interpreter, and are compiled for GPUs without being run"
    return Finding("triton", State.OK, f"{finding.detail}; kernels {how}")


def gpu_finding() -> Finding:
    """Check for a GPU that torch can use; the labs run without one."""
    machine = machine_facts()
    if machine is None:
        return Finding("GPU", State.NOT_VERIFIED, "torch is missing")
    if machine.gpu is not None:
        import torch

        gpu, built_for = machine.gpu, torch.cuda.get_arch_list()
        detail = f"{gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB, sm_{gpu.compute_capability.replace('.', '')}"
        if not has_kernels_for(gpu.compute_capability, built_for):
            detail += f", for which this torch has no kernels: it has those of {', '.join(built_for)}"
            return Finding("GPU", State.LIMITED, detail, "the labs run on the CPU; a torch for this card brings it in")
        return Finding("GPU", State.OK, detail)
    if shutil.which("nvidia-smi"):
        advice = "if torch above is a CPU build, run: make clean-all setup; else the driver may be too old for it"
        return Finding("GPU", State.LIMITED, "torch cannot use the one that this machine seems to have", advice)
    return Finding("GPU", State.NOT_VERIFIED, "none found", "none is needed: the labs run on the CPU")


def has_kernels_for(capability: str, built_for: Sequence[str]) -> bool:
    """Tell whether a card can run a build.

    Args:
        capability: Of the card, such as ``"12.0"``.
        built_for: As torch lists it: ``"sm_90"`` is machine code, which later cards of the same generation run too;
            ``"compute_90"`` is intermediate code, which the driver translates for any later card.
    """
    card = tuple(map(int, capability.split(".")))
    for name in built_for:
        kind, _, number = name.partition("_")
        digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")  # sm_90a is for sm_90 alone
        if not digits.isdigit():
            continue
        built = int(digits[:-1]), int(digits[-1])
        if card == built or (digits == number and built <= card and (kind == "compute" or card[0] == built[0])):
            return True
    return False


def speed_finding() -> Finding:
    """Say what this machine can do at most, if that was measured."""
    try:
        from labkit.probing import kept_bounds
    except ImportError as error:
        return Finding("speed", State.NOT_VERIFIED, f"what measures it does not import: {error}", "run: make setup")
    machine = machine_facts()
    bounds = kept_bounds("cuda" if machine and machine.gpu else "cpu")
    if bounds is None:
        return Finding("speed", State.NOT_VERIFIED, "not measured yet", "run: make measure")
    dtype = bounds.point_dtype
    rates = f"reads {bounds.read / 1e9:.3g} GB/s, multiplies {bounds.flops(dtype) / 1e9:.3g} GFLOP/s in {dtype}"
    return Finding("speed", State.OK, rates + (" (measured in a hurry)" if bounds.quick else ""))


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
    return Finding("sandbox", State.OK, f"tier bwrap: {program}, with user, process and network namespaces")


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
        "torch": torch_finding,
        "triton": triton_finding,
        "transformers": lambda: package_finding("transformers"),
        "pytest": lambda: package_finding("pytest"),
        "GPU": gpu_finding,
        "speed": speed_finding,
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
    print("Next: labs/07_kv_cache/README.md, and make test-lab07 TASK=1, which fails until you have written the task.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
