"""The sandbox of a submission: bubblewrap with nothing in it but Python, labkit and the submission itself."""

from __future__ import annotations

import enum
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import labkit
from labkit.paths import cache_dir

HERE = Path(__file__).resolve().parent
LABKIT = Path(labkit.__file__).resolve().parent
WORKER_FILES = ("worker.py", "wire.py", "scratch.py", "seccomp.py")
"""The only files of the grader that a submission can see: they move messages and know no answer."""

INSIDE = "/workbook"
SUBMISSION = "/submission"


class Tier(enum.Enum):
    """How strongly submissions are held."""

    BWRAP = "bwrap"
    NONE = "none"


class SandboxUnavailable(RuntimeError):
    """Submissions cannot be held here; the text says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """What one test of a submission may use, and all of them together.

    Args:
        cpu_seconds: processor time of one test; decides.
        wall_seconds: clock time of one test; the safety net for code that sleeps.
        total_cpu_seconds: processor time of all tests of the submission.
        memory_bytes: private memory of the process under test.
        file_bytes: all files it writes, and the largest single one.
        output_bytes: what it prints in all.
        start_seconds: clock time for the worker to start; passing it is the grader's trouble, not the student's.
    """

    cpu_seconds: int = 20
    wall_seconds: float = 90.0
    total_cpu_seconds: float = 300.0
    memory_bytes: int = 3 << 30
    file_bytes: int = 64 << 20
    output_bytes: int = 16 << 20
    start_seconds: float = 180.0


@cache
def bwrap_fault() -> str | None:
    """Why bubblewrap cannot hold a process here, or None if it can."""
    if not sys.platform.startswith("linux"):
        return f"bubblewrap needs Linux, and this is {sys.platform}; use Linux or WSL2"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed; install it with: sudo apt-get install bubblewrap"
    command = ["bwrap", *_namespaces(), "--ro-bind", "/usr", "/usr", *_system_links(), "--", "/usr/bin/true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        return (
            f"bubblewrap cannot make its namespaces here ({tried.stderr.strip() or 'no reason given'}); "
            "allow unprivileged user namespaces (on Ubuntu: an AppArmor profile for bwrap), "
            "or grade outside the container"
        )
    try:
        import pyseccomp  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"libseccomp is missing ({error}); install it with: sudo apt-get install libseccomp2"
    return None


def choose_tier(allow_none: bool = False) -> Tier:
    """The strongest tier that works here.

    Args:
        allow_none: go without a sandbox rather than fail.

    Raises:
        SandboxUnavailable: if no sandbox works and going without is not allowed.
    """
    fault = bwrap_fault()
    if fault is None:
        return Tier.BWRAP
    if allow_none:
        return Tier.NONE
    raise SandboxUnavailable(fault)


def command(tier: Tier, folder: Path, control_fd: int, limits: Limits) -> list[str]:
    """The command line that starts a worker.

    Args:
        tier: how it is held.
        folder: the submission; seen at `SUBMISSION`, read-only.
        control_fd: the inherited socket it takes orders from.
        limits: sizes of its temporary file systems.
    """
    worker = [sys.executable, "-m", "grader.isolation.worker", str(control_fd)]
    if tier is Tier.NONE:
        return worker
    binds: list[str] = []
    for path in _python_folders():
        binds += ["--ro-bind", str(path), str(path)]
    binds += ["--ro-bind", str(LABKIT), f"{INSIDE}/labkit"]
    for name in WORKER_FILES:
        binds += ["--ro-bind", str(HERE / name), f"{INSIDE}/grader/isolation/{name}"]
    if cache_dir().is_dir():
        binds += ["--ro-bind", str(cache_dir()), f"{INSIDE}/.cache"]
    binds += ["--ro-bind", str(folder.resolve()), SUBMISSION]
    size = str(limits.file_bytes)
    return [
        "bwrap",
        *_namespaces(),
        *("--clearenv", *_flatten(("--setenv", name, value) for name, value in environment(tier).items())),
        *("--ro-bind", "/usr", "/usr"),
        *_system_links(),
        # The one file of /etc: where shared libraries lie.
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", "/tmp"),
        *binds,
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"),
        "--",
        *worker,
    ]


def environment(tier: Tier) -> dict[str, str]:
    """Environment variables of the worker: nothing of the caller's own."""
    root = INSIDE if tier is Tier.BWRAP else str(LABKIT.parent)
    cached = f"{INSIDE}/.cache" if tier is Tier.BWRAP else str(cache_dir())
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # The order of sets is the same in every run, and so is the score of code that depends on it.
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": root,
        "WORKBOOK_CACHE": cached,
    }


def _namespaces() -> list[str]:
    nobody = "65534"
    return [
        *("--unshare-user", "--uid", nobody, "--gid", nobody, "--disable-userns"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "lab"),
    ]


def _system_links() -> list[str]:
    """/bin, /lib and the like: links into /usr on merged systems, folders of their own on others."""
    arguments = []
    for path in (Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib64"), Path("/lib32")):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments


def _python_folders() -> list[Path]:
    """The interpreter and its packages, outermost folders only and without what /usr already shows."""
    named = {sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders = {Path(name) for name in named} | {Path(name).resolve() for name in named}
    folders.add(Path(sys.executable).resolve().parent)
    outermost = [f for f in folders if not any(f != other and f.is_relative_to(other) for other in folders)]
    return sorted(folder for folder in outermost if not folder.is_relative_to("/usr"))


def _flatten(groups: Iterable[tuple[str, ...]]) -> list[str]:
    return [part for group in groups for part in group]
