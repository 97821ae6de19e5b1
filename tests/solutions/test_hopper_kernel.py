"""The Hopper kernel, without a Hopper card: what it compiles to, its arithmetic, and when it is chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.launch import VARIABLE, triton_fault
from labkit.paths import cache_dir, repo_root

SCRIPT = Path(__file__).with_name("hopper_kernel.py")

pytestmark = pytest.mark.skipif(triton_fault() is not None, reason=f"not verified here: {triton_fault()}")


def run(mode: str, **environment: str) -> dict[str, Any]:
    """What the script says in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    cache = {"TRITON_CACHE_DIR": str(cache_dir() / "triton"), "PYTHONPATH": str(repo_root())}
    process = subprocess.run(
        [sys.executable, str(SCRIPT), mode], env={**kept, **cache, **environment}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_it_compiles_to_tensor_maps_and_specialized_warps() -> None:
    facts = run("compile")
    assert facts["matrix_units"] and facts["tensor_maps"] and facts["specialized_warps"], facts
    assert facts["shared_bytes"] <= 227 << 10, "more shared memory than an H100 has"


def test_its_arithmetic_is_that_of_the_forward_pass() -> None:
    # Outputs are rounded to fp16, whose eps is 1e-3; log-sum-exps are in fp32.
    assert max(run("interpret", **{VARIABLE: "1"})["errors"]) < 2e-3
