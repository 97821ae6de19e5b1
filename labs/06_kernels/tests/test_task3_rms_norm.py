"""Task 3: residual addition and RMSNorm in one kernel, against float64; and what the fusion saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_traffic, check_unwritten
from grader.judge.layouts import LAYOUTS, arranged, laid_out, unwritten
from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused
from grader.judge.row_reference import rms_norm64

pytestmark = pytest.mark.task(3)

CASES = pairwise(
    {
        "hidden_size": [1, 15, 16, 17, 40],
        "rows": [1, 3, 4, 5],
        "block_rows": [1, 4, None],
        "layout": LAYOUTS,
        "dtype": [torch.float32, torch.float16],
        "eps": [1e-5, 0.3],
    }
)
assert len(CASES) <= 24


def rows_of(rows: int, hidden_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """x, residual and weight of both signs, with an outlier channel and rows of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, hidden_size, generator=generator) for _ in range(2))
    residual = residual * (1 + torch.arange(rows).unsqueeze(1))
    residual[:, hidden_size // 2] += 12.0 * (-1.0) ** torch.arange(rows)
    weight = torch.randn(hidden_size, generator=generator) + 0.5
    return tuple(tensor.to(dtype) for tensor in (x, residual, weight))


def check_norm(what: str, got: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, advice: str) -> None:
    """Both results: the sum exactly, the norm of that very sum against float64."""
    assert isinstance(got, (tuple, list)) and len(got) == 2, f"{what} must return (normed, residual), got {got!r}"
    total = x + residual
    check_equal(f"the new residual of {what}", got[1], total, f"It is x + residual, rounded to the dtype. {advice}")
    right = rms_norm64(total, weight, eps)
    # In half precision the textbook rounds after the division and after the weight.
    plain = rms_norm64(total, torch.ones_like(weight), eps).to(x.dtype) * weight
    scale = float(right.abs().max())
    check_close(
        f"normed of {what}", got[0], right, scale=scale, dtype=x.dtype, plain=plain, inputs=(x, total), advice=advice
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_twin_matches_float64(lab: Any, dtype: torch.dtype) -> None:
    for layout in ("contiguous", "columns first"):
        x, residual, weight = rows_of(4, 13, dtype, seed=1)
        given = [laid_out(x, layout), laid_out(residual, layout)]
        got = lab.add_rms_norm_torch(*given, weight, 0.05)
        advice = "total / sqrt(mean(total²) + eps) · weight, in fp32."
        check_norm("add_rms_norm_torch", got, x, residual, weight, 0.05, advice)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_norm_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    x, residual, weight = rows_of(case["rows"], case["hidden_size"], case["dtype"], seed=2)
    given, out = arranged(case["layout"], [x, residual], 2)
    got = lab.add_rms_norm(*given, weight, case["eps"], block_rows=case["block_rows"], out=tuple(out))
    check_norm("add_rms_norm", got, x, residual, weight, case["eps"], f"Case: {case}")
    check_norm("out after add_rms_norm", out, x, residual, weight, case["eps"], f"Case: {case}")
    unchanged = torch.equal(given[0], x) and torch.equal(given[1], residual)
    assert unchanged, "add_rms_norm changed x or residual, although `out` lies elsewhere"


def test_norm_divides_by_the_row_s_own_size(lab: Any) -> None:
    for hidden_size in (5, 8, 9):
        x, residual, weight = rows_of(3, hidden_size, seed=3)
        advice = f"The mean is over {hidden_size} numbers, whatever the tile's size; each row has its own."
        check_norm(f"{hidden_size} columns", lab.add_rms_norm(x, residual, weight), x, residual, weight, 1e-5, advice)


def test_norm_squares_do_not_overflow(lab: Any) -> None:
    x, residual, weight = rows_of(3, 20, torch.float16, seed=4)
    x, residual = x * 300, residual * 300
    advice = "The squares pass 65,504 here: compute in fp32 from the load on."
    check_norm("large rows", lab.add_rms_norm(x, residual, weight), x, residual, weight, 1e-5, advice)
    x, residual = x / 1e7, residual / 1e7
    advice = "The squares vanish in fp16, and eps lies within the root: sqrt(mean + eps)."
    check_norm("small rows", lab.add_rms_norm(x, residual, weight, 1e-6), x, residual, weight, 1e-6, advice)


def test_norm_is_that_of_the_stored_sum(lab: Any) -> None:
    # 2048 + 0.9 rounds to 2048 in fp16 (or to 2050): with a weight of 2048 on a column the difference shows.
    x = torch.tensor([[0.9, -2048.0, 1.0], [0.9, 1.0, -2048.0]], dtype=torch.float16)
    residual = torch.tensor([[2048.0, 2048.9, 1.0], [2048.0, 1.0, 2048.9]], dtype=torch.float16)
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float16)
    got = lab.add_rms_norm(x, residual, weight)
    advice = "Round the sum to the dtype, store it, and go on with what was stored."
    check_norm("sums that round", got, x, residual, weight, 1e-5, advice)


def test_norm_may_overwrite_its_inputs(lab: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        x, residual, weight = rows_of(5, 11, dtype, seed=5)
        in_place = x.clone(), residual.clone()
        advice = "Load both tiles before you store either."
        check_norm("add_rms_norm", lab.add_rms_norm(x, residual, weight), x, residual, weight, 1e-5, advice)
        got = lab.add_rms_norm(*in_place, weight, block_rows=2, out=in_place)
        check_norm("add_rms_norm in place", got, x, residual, weight, 1e-5, advice)
        check_norm("x and residual after it", in_place, x, residual, weight, 1e-5, advice)


@pytest.mark.parametrize(("block_rows", "tiles"), [(1, 7), (2, 4), (4, 2)])
def test_norm_moves_each_row_once(lab: Any, block_rows: int, tiles: int) -> None:
    for dtype in (torch.float32, torch.float16):
        x, residual, weight = rows_of(7, 13, dtype, seed=6)
        got, log = lab.observe("add_rms_norm", x, residual, weight, block_rows=block_rows)
        check_norm("add_rms_norm", got, x, residual, weight, 1e-5, "")
        size, extra = x.numel() * dtype.itemsize, weight.numel() * dtype.itemsize
        advice = "In: x, residual, and the weight once a tile. Out: both results. Two kernels would read the sum again."
        loaded, stored = 2 * size + tiles * extra, 2 * size
        check_traffic("add_rms_norm", log, launches=1, loaded=loaded, stored=stored, advice=advice)


def test_norm_accesses_stay_inside(lab: Any) -> None:
    for rows, hidden_size, block_rows in ((5, 9, 4), (1, 16, 2), (3, 1, 1)):
        x, residual, weight = rows_of(rows, hidden_size, seed=7)
        got, log = lab.observe("add_rms_norm", x, residual, weight, block_rows=block_rows)
        check_norm("add_rms_norm", got, x, residual, weight, 1e-5, "")
        check_accesses(f"add_rms_norm of {rows} rows of {hidden_size}, {block_rows} in a tile", log)


def test_the_norm_kernel_does_the_work(lab: Any) -> None:
    x, residual, weight = rows_of(3, 10, seed=8)
    check_norm("add_rms_norm", lab.add_rms_norm(x, residual, weight), x, residual, weight, 1e-5, "")
    out = unwritten(x.shape, x.dtype), unwritten(x.shape, x.dtype)
    lab.without_launches("add_rms_norm", x, residual, weight, out=out)
    check_unwritten("add_rms_norm", *out)


def test_norm_refuses_what_does_not_fit(lab: Any) -> None:
    x, residual, weight = rows_of(3, 10, seed=9)
    check_norm("add_rms_norm", lab.add_rms_norm(x, residual, weight), x, residual, weight, 1e-5, "")
    check_norm("add_rms_norm_torch", lab.add_rms_norm_torch(x, residual, weight), x, residual, weight, 1e-5, "")
    check_refused("a residual of 2 rows", lambda: lab.add_rms_norm(x, residual[:2], weight))
    check_refused("a weight of 9 columns", lambda: lab.add_rms_norm(x, residual, weight[:9]))
    check_refused("x with 3 axes", lambda: lab.add_rms_norm(x.unsqueeze(0), residual.unsqueeze(0), weight))
    check_refused("a weight in fp16", lambda: lab.add_rms_norm(x, residual, weight.half()))
    check_refused("an eps below 0", lambda: lab.add_rms_norm(x, residual, weight, -1e-5))
    check_refused("tiles of 3 rows", lambda: lab.add_rms_norm(x, residual, weight, block_rows=3))
