"""Which way a launcher goes, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from labkit import launch
from labkit.manifest import ROOT, load_manifest
from labkit.native import native_device


class Kernel:
    """Notes its launches."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **meta: self.launched.append((grid, args, meta))


def test_a_cpu_tensor_is_interpreted_or_left_to_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2)
    assert launch.backend(x, x) == "interpreted"
    monkeypatch.setenv(launch.VARIABLE, "0")
    assert launch.backend(x) == "twin"
    with pytest.raises(ValueError, match=r"kernel cannot run on a CPU unless TRITON_INTERPRET=1"):
        launch.launch(Kernel(), (1,), x)


def test_tensors_must_share_a_device_that_has_kernels() -> None:
    with pytest.raises(ValueError, match="got none"):
        launch.backend()
    with pytest.raises(ValueError, match="got cpu, meta"):
        launch.backend(torch.zeros(1), torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match="no kernels for device 'meta'"):
        launch.backend(torch.zeros(1, device="meta"))


def test_a_kernel_made_for_a_gpu_is_not_interpreted() -> None:
    kernel = Kernel()
    with pytest.raises(RuntimeError, match="before the interpreter was switched on"):
        launch.launch(kernel, (1,), torch.zeros(1))
    assert kernel.launched == []


def test_launches_can_be_switched_off_and_still_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch.without_launches():
        launch.launch(Kernel(), (1,), torch.zeros(1))
        with pytest.raises(ValueError, match="one device"):
            launch.launch(Kernel(), (1,), torch.zeros(1), torch.zeros(1, device="meta"))


def test_a_missing_triton_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(launch.sys.modules, "triton")
    with pytest.raises(ModuleNotFoundError, match="make setup"):
        launch.use_interpreter()
    monkeypatch.setattr(launch.sys, "platform", "darwin")
    assert "Linux, or WSL2" in (launch.triton_fault() or "")


def test_tensors_go_to_a_gpu_only_where_kernels_run_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, plain = load_manifest("06"), load_manifest("07")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert native_device(kernels) == "cpu", "interpreted"
    monkeypatch.setenv(launch.VARIABLE, "0")
    assert (native_device(kernels), native_device(plain)) == ("cuda", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert native_device(kernels) == "cpu"


def test_a_suite_with_kernels_switches_the_interpreter_on() -> None:
    test = "labs/06_kernels/tests/test_task5_swiglu.py"
    environment = {name: value for name, value in os.environ.items() if name != launch.VARIABLE}
    command = [sys.executable, "-m", "pytest", test, "-q", "--impl", "solutions", "-k", "accesses or bytes", "-x"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, "with nothing interpreted there would be no record to look at"
