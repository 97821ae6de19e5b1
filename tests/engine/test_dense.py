"""Products with plain weights: the same numbers in whatever layout, and the layout only where it is to be had."""

from __future__ import annotations

import platform

import psutil
import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from solutions.engine.models.dense import LaidOutProduct, dense, has_layout, padded_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NO_LAYOUT = pytest.mark.skipif(not has_layout(torch.zeros(1)), reason="no layout of its own on this CPU")


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


INPUTS = {
    "one token": lambda dtype: numbers(1, 40, dtype=dtype),
    "many": lambda dtype: numbers(70, 40, dtype=dtype),
    "more than one product takes": lambda dtype: numbers(1100, 40, dtype=dtype),
    "none": lambda dtype: numbers(0, 40, dtype=dtype),
    "turned": lambda dtype: numbers(40, 5, dtype=dtype).T,
    "part of something": lambda dtype: numbers(5, 90, dtype=dtype)[:, 3:43],
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INPUTS)
def test_it_is_the_product(name: str, dtype: torch.dtype, has_bias: bool) -> None:
    weight, bias = numbers(48, 40, dtype=dtype, seed=1), numbers(48, dtype=dtype, seed=2)
    inputs = INPUTS[name](dtype)
    with torch.inference_mode():
        got = dense(weight, bias if has_bias else None)(inputs)
    reference = inputs.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    assert got.dtype == dtype and got.shape == reference.shape
    scale = float((inputs.double().abs() @ weight.double().abs().T).max()) if len(inputs) else 1.0
    check_close("outputs", got, reference, scale=scale, dtype=dtype)


def test_kernels_are_few_and_little_is_computed_in_vain() -> None:
    counts = range(1, 513)
    assert len({padded_tokens(count) for count in counts}) == 25
    assert all(count <= padded_tokens(count) <= max(8, 1.8 * count) for count in counts)
    assert sum(map(padded_tokens, counts)) < 1.12 * sum(counts)
    assert [padded_tokens(count) for count in (0, 1, 8, 9, 64, 65, 256, 257)] == [0, 1, 8, 16, 64, 96, 256, 320]


@NO_LAYOUT
def test_numbers_of_tokens_that_were_never_seen_take_no_memory() -> None:
    product = LaidOutProduct(numbers(1024, 512))
    inputs = numbers(512, 512, seed=3)
    with torch.inference_mode():
        for count in range(8, 513, 8):
            product(inputs[:count])
        before = psutil.Process().memory_info().rss
        for count in range(1, 512):
            product(inputs[:count])
    assert psutil.Process().memory_info().rss - before < 40 * 2**20


@NO_LAYOUT
def test_a_compiled_step_has_the_same_product() -> None:
    products = [LaidOutProduct(numbers(48, 40, seed=seed), numbers(48, seed=9)) for seed in (1, 2)]
    inputs = numbers(5, 40)
    compiled = torch.compile(lambda x: products[0](x) - products[1](x), backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(inputs), products[0](inputs) - products[1](inputs))
    torch._dynamo.reset()


def test_the_layout_is_for_cpus_and_types_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def are_laid_out() -> list[bool]:
        return [has_layout(torch.zeros(2, 2, dtype=dtype)) for dtype in DTYPES]

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for units, wanted in (
        (("avx2", "avx512_bf16"), [True, True, False, False]), (("avx2",), [True, False, False, False]),
        (("amx_bf16",), [False, True, False, False]), ((), [False] * 4),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda units=units: dict.fromkeys(units, True))
        assert are_laid_out() == wanted
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(("avx2", "avx512_bf16"), True))
    assert not has_layout(torch.zeros(2, 2, device="meta"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert are_laid_out() == [False] * 4
    monkeypatch.undo()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert are_laid_out() == [False] * 4
    assert not isinstance(dense(torch.zeros(2, 2)), LaidOutProduct)
