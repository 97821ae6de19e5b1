"""What the tests of the project's habits read: the files under version control."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tracked_files() -> list[Path]:
    """Files that git knows and that are there, absolute; without git or a checkout the test is skipped."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not verified here: this copy of the workbook is not a git checkout")
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.fixture(scope="session")
def makefile() -> str:
    """The text of the Makefile."""
    return (ROOT / "Makefile").read_text()
