"""Stretch task 15: int8 products, against whole-number sums of Python's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_traffic, check_unwritten
from grader.judge.layouts import laid_out, unwritten
from grader.judge.numerics import check_close
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(15)

CASES = pairwise(
    {
        "in_features": [1, 31, 32, 33, 100],
        "rows": [1, 16, 17],
        "out_features": [2, 16, 35],
        "dtype": [torch.float32, torch.float16],
        "scales": [torch.float32, torch.float16],
        "layout": ["contiguous", "columns first", "every other"],
        "block_k": [32, 64],
    }
)
assert len(CASES) <= 24

Factors = tuple[Tensor, Tensor, Tensor, Tensor]


def factors(
    rows: int, out_features: int, in_features: int, scales: torch.dtype = torch.float32, seed: int = 0
) -> Factors:
    """a and b over all of int8, with different scales for every row."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-128, 128, (rows, in_features), generator=generator).to(torch.int8)
    b = torch.randint(-128, 128, (out_features, in_features), generator=generator).to(torch.int8)
    a_scales = (0.001 * (1 + torch.arange(rows))).to(scales)
    b_scales = (0.002 * (1 + torch.arange(out_features).flip(0))).to(scales)
    return a, b, a_scales, b_scales


def check_product(what: str, got: Any, given: Factors, dtype: torch.dtype, advice: str) -> None:
    """Against exact sums, scaled in float64: what is left is a few roundings of each result."""
    a, b, a_scales, b_scales = given
    sums = (a.long()[:, None, :] * b.long()[None, :, :]).sum(-1)
    right = sums.double() * a_scales.double()[:, None] * b_scales.double()
    check_close(what, got, right, scale=float(right.abs().max()), dtype=dtype, advice=advice)
    # Each result by itself too: a bound from the largest one says nothing of the others.
    worst = float(((got.double() - right).abs() / right.abs().clamp_min(1e-2)).max())
    limit = 8 * torch.finfo(dtype).eps
    assert worst <= limit, f"{what} is off by {worst:.2g} of a result, allowed {limit:.2g}. {advice}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_w8a8_twin_is_exact_but_for_rounding(lab: Any, dtype: torch.dtype) -> None:
    given = factors(5, 7, 40, seed=1)
    check_product("w8a8_matmul_torch", lab.w8a8_matmul_torch(*given, dtype), given, dtype, "Sum whole numbers.")


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_w8a8_kernel_is_exact_but_for_rounding(lab: Any, case: dict[str, Any]) -> None:
    rows, out_features, dtype = case["rows"], case["out_features"], case["dtype"]
    given = factors(rows, out_features, case["in_features"], case["scales"], seed=2)
    a, b = (laid_out(factor, case["layout"]) for factor in given[:2])
    strided = [laid_out(scales.unsqueeze(0), case["layout"])[0] for scales in given[2:]]
    out = laid_out(unwritten((rows, out_features), dtype), case["layout"])
    sizes = dict(block_m=16, block_n=16, block_k=case["block_k"])
    got = lab.w8a8_matmul(a, b, *strided, dtype, **sizes, out=out)
    check_product("w8a8_matmul", got, given, dtype, f"Case: {case}")
    check_product("out after w8a8_matmul", out, given, dtype, f"Case: {case}")


def test_sums_stay_whole_numbers(lab: Any) -> None:
    # 1,100 products of 127 · 127 pass 2^24, where fp32 begins to skip odd numbers; the rest takes them away again.
    a = torch.full((2, 2_201), 127, dtype=torch.int8)
    b = torch.full((3, 2_201), 127, dtype=torch.int8)
    b[1, 1_100:-1] = -127
    b[1, -1] = 126
    b[2, :] = -128
    a[1, 0] = 126
    scales = torch.full((2,), 2.0**-25), torch.ones(3)
    for block_k in (64, 256):
        got = lab.w8a8_matmul(a, b, *scales, torch.float32, block_k=block_k)
        check_product("w8a8_matmul", got, (a, b, *scales), torch.float32, "Accumulate in int32: every sum is exact.")


def test_w8a8_moves_one_byte_a_number(lab: Any) -> None:
    given = factors(20, 35, 70, seed=3)
    got, log = lab.observe("w8a8_matmul", *given, torch.float16, block_m=16, block_n=16, block_k=32)
    check_product("w8a8_matmul", got, given, torch.float16, "")
    loaded = 3 * (20 * 70 + 20 * 4) + 2 * (35 * 70 + 35 * 4)
    advice = "a once a tile of columns, b once a tile of rows, each scale once a program."
    check_traffic("w8a8_matmul", log, launches=1, loaded=loaded, stored=20 * 35 * 2, advice=advice)
    check_accesses("w8a8_matmul of 20 by 35 by 70", log)


def test_the_w8a8_kernel_does_the_work(lab: Any) -> None:
    given = factors(3, 5, 20, seed=4)
    check_product("w8a8_matmul", lab.w8a8_matmul(*given), given, torch.float16, "")
    out = unwritten((3, 5), torch.float16)
    lab.without_launches("w8a8_matmul", *given, out=out)
    check_unwritten("w8a8_matmul", out)


def test_w8a8_refuses_what_does_not_fit(lab: Any) -> None:
    a, b, a_scales, b_scales = given = factors(3, 5, 20, seed=5)
    check_product("w8a8_matmul", lab.w8a8_matmul(*given), given, torch.float16, "")
    check_product("w8a8_matmul_torch", lab.w8a8_matmul_torch(*given), given, torch.float16, "")
    check_refused("19 columns against 20", lambda: lab.w8a8_matmul(a[:, :19], b, a_scales, b_scales))
    check_refused("a in uint8", lambda: lab.w8a8_matmul(a.to(torch.uint8), b, a_scales, b_scales))
    check_refused("2 scales for 3 rows", lambda: lab.w8a8_matmul(a, b, a_scales[:2], b_scales))
    check_refused("a scale a column", lambda: lab.w8a8_matmul(a, b, a_scales, torch.ones(20)))
    check_refused("a result in int32", lambda: lab.w8a8_matmul(*given, torch.int32))
    check_refused("K tiles of 16", lambda: lab.w8a8_matmul(*given, block_k=16), mentions="32")
