"""Launchers of the row kernels and products on a plain CPU: there the twins answer, in bf16 too, and into `out`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.layouts import laid_out
from labkit.launch import VARIABLE, triton_fault
from labkit.loader import LabPackage
from labkit.manifest import load_manifest

pytestmark = pytest.mark.skipif(triton_fault() is not None, reason=f"not verified here: {triton_fault()}")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[LabPackage]:
    """The reference, imported anew without the interpreter."""
    monkeypatch.delenv(VARIABLE, raising=False)
    manifest = load_manifest("06")
    package = LabPackage("kernels_on_a_cpu", manifest.solutions, manifest.modules)
    package.mount()
    yield package
    package.unmount()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of both signs."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def calls(dtype: torch.dtype) -> dict[str, tuple[str, tuple[Any, ...], tuple[Tensor, ...]]]:
    """By launcher: its module, arguments, and outputs to write to in strides of their own."""
    row = random(3, 10, dtype=dtype)
    table, positions = torch.ones(9, 3), torch.arange(4).expand(2, 4)
    q, k = random(2, 4, 4, 6, dtype=dtype), random(2, 2, 4, 6, dtype=dtype)
    packed, scales = torch.full((5, 32), 0x3C, dtype=torch.uint8), torch.full((5, 2), 0.1)
    a, b = torch.full((3, 20), 5, dtype=torch.int8), torch.full((4, 20), -7, dtype=torch.int8)
    ones, none = torch.ones(3), torch.zeros(3)
    sampling = (row, ones, none.int(), ones, none, ones / 2)

    def like(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(laid_out(torch.full_like(tensor, 7), "every other") for tensor in tensors)

    return {
        "fused_softmax": ("fused_softmax", (row,), like(row)),
        "add_rms_norm": ("rms_norm", (row, row.flip(0), row[0]), like(row, row)),
        "apply_rope": ("rope", (q, k, table, table / 2, positions), like(q, k)),
        "swiglu": ("swiglu", (row, row.flip(1)), like(row)),
        "w4a16_matmul": ("w4a16", (random(3, 64, dtype=dtype), packed, scales, None, 32), like(row[:, :5])),
        "w8a8_matmul": ("w8a8", (a, b, ones, torch.ones(4), dtype), like(row[:, :4])),
        "fused_sample": ("sampling_kernel", sampling, (torch.zeros(6, dtype=torch.int64)[::2],)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(calls(torch.float32)))
def test_the_twin_answers_on_a_cpu(kernels: LabPackage, name: str, dtype: torch.dtype) -> None:
    module_name, arguments, outputs = calls(dtype)[name]
    module = kernels.module(module_name)
    right = getattr(module, f"{name}_torch")(*arguments)
    got = getattr(module, name)(*arguments)
    out: Any = outputs if isinstance(right, tuple) else outputs[0]
    written = getattr(module, name)(*arguments, out=out)
    pairs = zip(right, got, written, outputs, strict=True) if isinstance(right, tuple) else [(right, got, written, out)]
    for wanted, fresh, returned, given in pairs:
        assert torch.equal(fresh, wanted) and torch.equal(given, wanted)
        assert returned is given, "a launcher returns the output that it was given"


@pytest.mark.parametrize("shape", [(0, 10), (3, 0)])
def test_nothing_in_gives_nothing_out(kernels: LabPackage, shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    softmax, norm, gate = (kernels.module(name) for name in ("fused_softmax", "rms_norm", "swiglu"))
    assert softmax.fused_softmax(empty).shape == shape
    assert softmax.fused_softmax_torch(empty).shape == shape
    assert norm.add_rms_norm(empty, empty, torch.zeros(shape[1]))[0].shape == shape
    assert gate.swiglu(empty, empty).shape == shape


def test_tensors_on_two_devices_are_refused(kernels: LabPackage) -> None:
    row, elsewhere = random(3, 10), torch.empty(3, 10, device="meta")
    with pytest.raises(ValueError, match="on meta"):
        kernels.module("fused_softmax").fused_softmax(row, out=elsewhere)
    with pytest.raises(ValueError, match="meta"):
        kernels.module("swiglu").swiglu(row, elsewhere)
