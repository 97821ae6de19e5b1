"""Task 5: SwiGLU in one kernel, against float64; and the round trips that it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_traffic, check_unwritten
from grader.judge.layouts import LAYOUTS, arranged, laid_out, unwritten
from grader.judge.numerics import check_close
from grader.judge.refusal import check_refused
from grader.judge.row_reference import swiglu64

pytestmark = pytest.mark.task(5)

CASES = pairwise(
    {
        "columns": [1, 15, 16, 17, 45],
        "block_size": [16, 64, None],
        "rows": [1, 4],
        "layout": LAYOUTS,
        "dtype": [torch.float32, torch.float16],
        "size": [1.0, 30.0],
    }
)
assert len(CASES) <= 24


def halves_of(rows: int, columns: int, size: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gate and up of both signs."""
    generator = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    return gate * 2 * size, up * 3


def check_swiglu(what: str, got: object, gate: Tensor, up: Tensor, advice: str) -> None:
    """Against float64, beside plain torch in the same dtype."""
    right = swiglu64(gate, up)
    plain = torch.nn.functional.silu(gate) * up
    scale = float(right.abs().max())
    dtype = gate.dtype
    check_close(what, got, right, scale=scale, dtype=dtype, plain=plain, inputs=(gate, up), advice=advice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_swiglu_twin_matches_float64(lab: Any, dtype: torch.dtype) -> None:
    gate, up = (laid_out(half.to(dtype), "columns first") for half in halves_of(4, 11, seed=1))
    check_swiglu("swiglu_torch", lab.swiglu_torch(gate, up), gate, up, "silu(gate) · up, in fp32.")


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_swiglu_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    gate, up = (half.to(case["dtype"]) for half in halves_of(case["rows"], case["columns"], case["size"], seed=2))
    given, (out,) = arranged(case["layout"], [gate, up], 1)
    got = lab.swiglu(*given, block_size=case["block_size"], out=out)
    check_swiglu("swiglu", got, gate, up, f"Case: {case}")
    check_swiglu("out after swiglu", out, gate, up, f"Case: {case}")
    unchanged = torch.equal(given[0], gate) and torch.equal(given[1], up)
    assert unchanged, "swiglu changed an argument, although `out` lies elsewhere"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_gates_stay_finite(lab: Any, dtype: torch.dtype) -> None:
    far = [89.0, -89.0, 1_000.0, -1_000.0, 60_000.0, -60_000.0, 0.0, 12.0, -12.0]
    if dtype == torch.float32:
        far += [1e5, -1e5, 3e38, -3e38]
    gate = torch.tensor([far, far[::-1]], dtype=dtype)
    up = torch.full_like(gate, 0.5)
    up[1] = -0.25
    got = lab.swiglu(gate, up)
    advice = "exp(89) is infinite in fp32, and ∞/∞ or −∞ · 0 is NaN: only exponentiate what is not positive."
    check_swiglu("swiglu", got, gate, up, advice)
    # Large gates must not hide the small ones behind the scale of the bound.
    middle = torch.tensor([[-20.0, -9.0, -3.0, -0.5, 0.25, 2.0]], dtype=dtype)
    ones = torch.ones_like(middle)
    check_swiglu("swiglu", lab.swiglu(middle, ones), middle, ones, advice)


def test_products_round_once(lab: Any) -> None:
    # In fp16 silu(-17.5) has three bits left: below 6e-5 numbers are subnormal.
    gate = torch.tensor([[-16.5, -17.5, -14.0, 0.001, 3.0]], dtype=torch.float16)
    up = torch.tensor([[60_000.0, -60_000.0, 50_000.0, 60_000.0, 1.0]], dtype=torch.float16)
    got = lab.swiglu(gate, up)
    right = swiglu64(gate, up)
    advice = "silu(-17.5) is 4e-7, too small for fp16, but its product with 60,000 is not: round once, at the end."
    check_close("swiglu", got, right, scale=float(right.abs().max()) / 8, dtype=torch.float16, advice=advice)
    worst = float(((got.double() - right) / right).abs().max())
    assert worst <= 4 * torch.finfo(torch.float16).eps, f"swiglu is off by {worst:.2g} of a value. {advice}"


def test_swiglu_may_overwrite_its_inputs(lab: Any) -> None:
    for which in (0, 1):
        gate, up = halves_of(3, 21, seed=4)
        in_place = gate.clone(), up.clone()
        check_swiglu("swiglu", lab.swiglu(gate, up), gate, up, "")
        got = lab.swiglu(*in_place, block_size=8, out=in_place[which])
        check_swiglu("swiglu in place", got, gate, up, "Load both tiles before the store.")
        check_swiglu("the output", in_place[which], gate, up, "Load both tiles before the store.")


def test_swiglu_reads_two_and_writes_one(lab: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        gate, up = (half.to(dtype) for half in halves_of(5, 27, seed=5))
        got, log = lab.observe("swiglu", gate, up, block_size=8)
        check_swiglu("swiglu", got, gate, up, "")
        size = gate.numel() * dtype.itemsize
        advice = "silu(gate) must not go to memory and back: 2 in, 1 out, where two kernels have 3 in and 2 out."
        check_traffic("swiglu", log, launches=1, loaded=2 * size, stored=size, advice=advice)


def test_swiglu_accesses_stay_inside(lab: Any) -> None:
    for columns, block_size in ((5, 8), (21, 8), (1, 16)):
        gate, up = halves_of(3, columns, seed=6)
        got, log = lab.observe("swiglu", gate, up, block_size=block_size)
        check_swiglu("swiglu", got, gate, up, "")
        check_accesses(f"swiglu of {columns} columns in tiles of {block_size}", log)


def test_the_swiglu_kernel_does_the_work(lab: Any) -> None:
    gate, up = halves_of(3, 10, seed=7)
    check_swiglu("swiglu", lab.swiglu(gate, up), gate, up, "")
    out = unwritten(gate.shape, gate.dtype)
    lab.without_launches("swiglu", gate, up, out=out)
    check_unwritten("swiglu", out)


def test_swiglu_refuses_what_does_not_fit(lab: Any) -> None:
    gate, up = halves_of(3, 10, seed=8)
    check_swiglu("swiglu", lab.swiglu(gate, up), gate, up, "")
    check_swiglu("swiglu_torch", lab.swiglu_torch(gate, up), gate, up, "")
    check_refused("up of 9 columns", lambda: lab.swiglu(gate, up[:, :9]))
    check_refused("up in fp16", lambda: lab.swiglu(gate, up.half()))
    check_refused("gate with 3 axes", lambda: lab.swiglu(gate.unsqueeze(0), up.unsqueeze(0)))
    check_refused("a tile of 12 columns", lambda: lab.swiglu(gate, up, block_size=12))
    check_refused("an output of another shape", lambda: lab.swiglu(gate, up, out=torch.empty(3, 9)))
