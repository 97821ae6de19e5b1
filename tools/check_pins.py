"""Check that the pinned triton is the one that the pinned torch demands on a machine with a GPU.

A CPU build of torch demands no triton, so a wrong pair of pins would pass every test here. pip is asked for
the metadata of the CUDA wheel alone, which takes seconds and downloads no wheel where the index offers it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
TIMEOUT_SECONDS = 60


def pinned_versions() -> dict[str, str]:
    """Read constraints.txt.

    Returns:
        Package name to exact version.
    """
    lines = [line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def demanded_triton(torch_version: str) -> Requirement | None:
    """Ask the package index what triton the Linux x86-64 wheel of torch requires.

    Args:
        torch_version: Such as ``2.13.0``.

    Returns:
        The requirement, or None if the index could not be asked or the wheel names none.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--only-binary=:all:"]
        command += ["--platform=manylinux_2_28_x86_64", "--python-version=3.12"]
        command += [f"--target={folder}", f"--report={report}", f"torch=={torch_version}"]
        # A folder of local wheels may hold a CPU build, which says nothing about triton.
        environment = {**os.environ, "PIP_FIND_LINKS": ""}
        try:
            subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS, check=True)
        except (subprocess.SubprocessError, OSError):
            return None
        metadata = json.loads(report.read_text())["install"][0]["metadata"]
    found = [Requirement(text) for text in metadata.get("requires_dist", [])]
    return next((requirement for requirement in found if requirement.name == "triton"), None)


def main() -> int:
    """Print the verdict; return 1 only if the pins are known to disagree."""
    pins = pinned_versions()
    pair = f"torch {pins['torch']} and triton {pins['triton']}"
    demanded = demanded_triton(pins["torch"])
    if demanded is None:
        print(f"pins of {pair}: *not verified here* (the metadata of torch's CUDA wheel could not be read)")
        return 0
    if not demanded.specifier.contains(pins["triton"]):
        print(f"pins of {pair}: WRONG, the CUDA wheel demands triton{demanded.specifier}")
        return 1
    print(f"pins of {pair}: agree (the CUDA wheel demands triton{demanded.specifier})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
