"""Task 2: the fused softmax kernel, against float64; and what it moves through memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_traffic, check_unwritten
from grader.judge.layouts import LAYOUTS, arranged, laid_out, unwritten
from grader.judge.numerics import check_close
from grader.judge.refusal import check_refused
from grader.judge.row_reference import plain_softmax, softmax_rows64

pytestmark = pytest.mark.task(2)

CASES = pairwise(
    {
        "columns": [1, 15, 16, 17, 45],
        "block_size": [16, 64, None],
        "rows": [1, 4],
        "layout": LAYOUTS,
        "dtype": [torch.float32, torch.float16],
        "hidden": ["none", "some", "the first half", "a row"],
    }
)
assert len(CASES) <= 24


def scores_of(rows: int, columns: int, hidden: str = "none", seed: int = 0) -> Tensor:
    """Scores of both signs, all well below 0 in the last row, some of them hidden."""
    scores = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 4
    scores[-1] -= 200.0
    if hidden == "some":
        scores[:, 1::3] = -math.inf
    if hidden == "the first half":
        scores[:, : columns // 2] = -math.inf
    if hidden == "a row":
        scores[rows // 2] = -math.inf
    return scores


def check_softmax(what: str, got: object, x: Tensor, advice: str) -> None:
    """Against float64; the scale is the largest weight."""
    right, plain = softmax_rows64(x), plain_softmax(x)
    scale = float(right.max())
    check_close(what, got, right, scale=scale, dtype=x.dtype, plain=plain, inputs=(x,), advice=advice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", ["none", "some", "a row"])
def test_softmax_twin_matches_float64(lab: Any, hidden: str, dtype: torch.dtype) -> None:
    for layout in ("contiguous", "columns first"):
        x = laid_out(scores_of(3, 11, hidden, seed=1).to(dtype), layout)
        advice = "Subtract the row's maximum, in fp32; a row of -inf has weights of 0."
        check_softmax(f"fused_softmax_torch of {hidden} hidden", lab.fused_softmax_torch(x), x, advice)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_softmax_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    x = scores_of(case["rows"], case["columns"], case["hidden"], seed=2).to(case["dtype"])
    (given,), (out,) = arranged(case["layout"], [x], 1)
    got = lab.fused_softmax(given, block_size=case["block_size"], out=out)
    check_softmax("fused_softmax", got, x, f"Case: {case}")
    check_softmax("out after fused_softmax", out, x, f"Case: {case}")
    assert torch.equal(given, x), "fused_softmax changed its argument in place"


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("sign", [1, -1])
def test_kernel_scores_far_from_zero_stay_finite(lab: Any, sign: int, block_size: int) -> None:
    x = sign * 100_000.0 + torch.arange(10.0).mul(0.5).expand(3, -1) + torch.tensor([[0.0], [2.0], [-4.0]])
    advice = f"All scores are near {sign * 100_000:,}; a softmax depends on differences only."
    check_softmax("fused_softmax", lab.fused_softmax(x, block_size=block_size), x, advice)
    falling = x.flip(1)
    check_softmax("fused_softmax", lab.fused_softmax(falling, block_size=block_size), falling, advice)


@pytest.mark.parametrize("block_size", [4, 16])
def test_kernel_tiles_may_be_hidden_anywhere(lab: Any, block_size: int) -> None:
    x = scores_of(6, 12, seed=3)
    x[0] = -math.inf
    x[1, :8] = -math.inf
    x[2, 4:] = -math.inf
    x[3, 4:8] = -math.inf
    advice = "A tile may hold nothing but -inf: it weighs nothing, wherever it stands; -inf − (-inf) is NaN."
    check_softmax("fused_softmax", lab.fused_softmax(x, block_size=block_size), x, advice)


def test_a_row_in_a_tile_moves_once_each_way(lab: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        x = scores_of(5, 27, seed=4).to(dtype)
        got, log = lab.observe("fused_softmax", x, block_size=32)
        check_softmax("fused_softmax", got, x, "")
        advice = "The row fits into the tile: load it once, keep it, store the weights. No other tensor is needed."
        size = x.numel() * dtype.itemsize
        check_traffic("fused_softmax of a row in a tile", log, launches=1, loaded=size, stored=size, advice=advice)


def test_a_row_of_many_tiles_is_read_twice(lab: Any) -> None:
    x = scores_of(5, 27, seed=5)
    got, log = lab.observe("fused_softmax", x, block_size=8)
    check_softmax("fused_softmax", got, x, "")
    advice = "One pass for maximum and total together, one for the weights: the online softmax saves the third."
    size = x.numel() * 4
    check_traffic("fused_softmax by tiles", log, launches=1, loaded=2 * size, stored=size, advice=advice)


def test_softmax_accesses_stay_inside(lab: Any) -> None:
    for columns, block_size in ((5, 8), (21, 8), (1, 16)):
        x = scores_of(3, columns, seed=6)
        got, log = lab.observe("fused_softmax", x, block_size=block_size)
        check_softmax("fused_softmax", got, x, "")
        check_accesses(f"fused_softmax of {columns} columns in tiles of {block_size}", log)


def test_the_softmax_kernel_does_the_work(lab: Any) -> None:
    x = scores_of(3, 10, seed=7)
    check_softmax("fused_softmax", lab.fused_softmax(x), x, "")
    out = unwritten(x.shape, x.dtype)
    lab.without_launches("fused_softmax", x, out=out)
    check_unwritten("fused_softmax", out)


def test_softmax_refuses_what_does_not_fit(lab: Any) -> None:
    x = scores_of(3, 10, seed=8)
    check_softmax("fused_softmax", lab.fused_softmax(x), x, "")
    check_softmax("fused_softmax_torch", lab.fused_softmax_torch(x), x, "")
    check_refused("x with 3 axes", lambda: lab.fused_softmax(x.unsqueeze(0)))
    check_refused("whole numbers", lambda: lab.fused_softmax(x.int()))
    check_refused("a tile of 12 columns", lambda: lab.fused_softmax(x, block_size=12))
    check_refused("an output of another shape", lambda: lab.fused_softmax(x, out=torch.empty(3, 9)))
    check_refused("an output of another dtype", lambda: lab.fused_softmax(x, out=torch.empty(3, 10).half()))


@pytest.mark.integration
def test_your_kernel_agrees_with_your_online_softmax(lab: Any) -> None:
    x = scores_of(4, 37, "some", seed=9)
    check_softmax("your online_softmax", lab.online_softmax(x, 16), x, "Task 1.")
    check_softmax("your fused_softmax", lab.fused_softmax(x, block_size=16), x, "Both go through the row by blocks.")
