"""A real run on this machine, by the command that people use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.probing import MachineBounds, machine_bounds
from labkit.probing.products import DTYPES

ROOT = Path(__file__).resolve().parents[2]


def run_tool(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """The tool in a process of its own, with one thread: two would wait for each other on a busy machine."""
    environment = {**os.environ, "WORKBOOK_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / "measure_gpu.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def check(bounds: MachineBounds) -> None:
    """What must hold of every machine, whatever its speed."""
    assert set(bounds.products) | set(bounds.missing) >= set(DTYPES), "each dtype has a rate or a reason"
    assert {"fp32"} <= set(bounds.products) and set(bounds.bandwidth) == {"read", "write", "copy"}
    spreads = [*bounds.bandwidth.values(), *bounds.products.values(), *bounds.launches.values()]
    spreads += [point.rate for point in bounds.points]
    assert all(0 < spread.low <= spread.median <= spread.high and spread.repeats >= 3 for spread in spreads)
    assert 1e8 < bounds.read < 2e13 and bounds.buffer_bytes >= 2 * (bounds.cache_bytes or 0)
    assert bounds.points and bounds.points[0].tokens == 1
    assert all(a.intensity < b.intensity for a, b in zip(bounds.points, bounds.points[1:], strict=False))


def test_the_tool_measures_this_processor_prints_json_and_draws_the_roof(tmp_path: Path) -> None:
    picture = tmp_path / "roof.png"
    ran = run_tool("--device", "cpu", "--quick", "--json", "--plot", str(picture), cache=tmp_path / "cache")
    assert ran.returncode == 0, ran.stderr
    bounds = MachineBounds.from_json(json.loads(ran.stdout))
    check(bounds)
    assert bounds.device == "cpu" and bounds.threads == 1 and bounds.quick
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = run_tool("--device", "cpu", "--quick", "--kept", cache=tmp_path / "cache")
    assert again.returncode == 0 and "products in fp32" in again.stdout, again.stderr
    assert f"{bounds.bandwidth['read'].median / 1e9:.3g}" in again.stdout, "what was kept is shown, not measured anew"


def test_what_cannot_be_done_is_a_sentence(tmp_path: Path) -> None:
    ran = run_tool("--device", "tpu", cache=tmp_path)
    assert ran.returncode == 2 and "device must be 'cpu' or 'cuda'" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="*not verified on a GPU*")
def test_a_gpu_is_measured_with_graphs_and_left_as_it_was(cache: Path) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    bounds = machine_bounds("cuda", quick=True)
    check(bounds)
    assert bounds.launches["graph"].median < bounds.launches["operator"].median
    assert bounds.flops("bf16") > bounds.flops("fp32"), "tensor cores are faster than plain float32"
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32) == before
