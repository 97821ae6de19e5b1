"""Task 10: products with packed 4-bit weights, against float64 arithmetic on the unpacked codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_traffic, check_unwritten
from grader.judge.layouts import laid_out, unwritten
from grader.judge.numerics import check_close, check_equal
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(10)

CASES = pairwise(
    {
        "group_size": [32, 64, 128],
        "groups": [1, 2, 3],
        "rows": [1, 15, 16, 17],
        "out_features": [1, 16, 33],
        "zeros": [True, False],
        "dtype": [torch.float32, torch.float16],
        "scales": [torch.float32, torch.float16],
        "layout": ["contiguous", "columns first", "every other"],
        "block_k": [32, None],
    }
)
assert len(CASES) <= 24


@dataclass(frozen=True)
class Weights:
    """Quantized weights and what they stand for, in float64 and by a way of its own."""

    codes: Tensor
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    right: Tensor


def weights_of(
    out_features: int,
    groups: int,
    group_size: int,
    has_zeros: bool,
    scales_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Weights:
    """Codes over the whole range, with a scale and a zero point of its own for every group of every row."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if has_zeros else (-8, 8)
    codes = torch.randint(low, high, (out_features, groups * group_size), generator=generator)
    scales = (0.02 + torch.rand(out_features, groups, generator=generator) * 0.3).to(scales_dtype)
    zeros = torch.randint(0, 16, (out_features, groups), generator=generator).to(torch.uint8) if has_zeros else None
    right = torch.empty(codes.shape, dtype=torch.float64)
    packed = torch.empty(out_features, codes.shape[1] // 2, dtype=torch.uint8)
    for row, line in enumerate(codes.tolist()):
        for column, code in enumerate(line):
            zero = int(zeros[row, column // group_size]) if zeros is not None else 0
            right[row, column] = float(scales[row, column // group_size]) * (code - zero)
        packed[row] = torch.tensor([line[j] % 16 + line[j + 1] % 16 * 16 for j in range(0, len(line), 2)])
    return Weights(codes, packed, scales, zeros, group_size, right)


def activations(rows: int, in_features: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    """x of both signs with one outlier channel."""
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 20
    return x.to(dtype)


def check_product(what: str, got: object, x: Tensor, w: Weights, advice: str) -> None:
    """Against float64; the scale is the largest sum of sizes, since the terms have both signs."""
    right = x.double() @ w.right.T
    plain = x @ w.right.to(x.dtype).T
    scale = float((x.double().abs() @ w.right.abs().T).max())
    check_close(what, got, right, scale=scale / 8, dtype=x.dtype, plain=plain, advice=advice)


def test_low_nibble_is_the_even_column(lab: Any) -> None:
    advice = "Byte j = column 2j + 16 · column 2j+1; a negative code keeps its low four bits."
    right = torch.tensor([[0x21, 0x43, 0xF0]], dtype=torch.uint8)
    check_equal("pack_int4((1, 2, 3, 4, 0, 15))", lab.pack_int4(torch.tensor([[1, 2, 3, 4, 0, 15]])), right, advice)
    right = torch.tensor([[0xF1, 0x78]], dtype=torch.uint8)
    check_equal("pack_int4((1, -1, -8, 7))", lab.pack_int4(torch.tensor([[1, -1, -8, 7]])), right, advice)
    for dtype, has_zeros in ((torch.int8, False), (torch.uint8, True), (torch.int64, False)):
        w = weights_of(3, 2, 32, has_zeros, seed=1)
        check_equal(f"pack_int4 of {dtype}", lab.pack_int4(w.codes.to(dtype)), w.packed, advice)


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize(("group_size", "groups"), [(32, 3), (64, 1), (128, 2)])
def test_codes_stand_for_their_group_s_weights(lab: Any, group_size: int, groups: int, has_zeros: bool) -> None:
    for scales_dtype in (torch.float32, torch.float16):
        w = weights_of(5, groups, group_size, has_zeros, scales_dtype, seed=2)
        got = lab.dequantize_int4(w.packed, w.scales, w.zeros, group_size)
        advice = "w = s · (c − z) with the s and z of column // group_size; without z, codes of 8 and more are c − 16."
        scale = float(w.right.abs().max()) / 8
        check_close("dequantize_int4", got, w.right, scale=scale, dtype=torch.float32, advice=advice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_w4a16_twin_matches_float64(lab: Any, has_zeros: bool, dtype: torch.dtype) -> None:
    w = weights_of(7, 2, 32, has_zeros, seed=3)
    x = activations(3, 64, dtype)
    got = lab.w4a16_matmul_torch(x, w.packed, w.scales, w.zeros, 32)
    check_product("w4a16_matmul_torch", got, x, w, "x · Wᵀ in fp32, rounded once.")


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_w4a16_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    group_size, rows = case["group_size"], case["rows"]
    w = weights_of(case["out_features"], case["groups"], group_size, case["zeros"], case["scales"], seed=4)
    x = activations(rows, case["groups"] * group_size, case["dtype"])
    layout = case["layout"]
    given = [laid_out(tensor, layout) for tensor in (x, w.packed, w.scales)]
    zeros = None if w.zeros is None else laid_out(w.zeros, layout)
    out = laid_out(unwritten((rows, case["out_features"]), case["dtype"]), layout)
    sizes = dict(block_m=16, block_n=16, block_k=case["block_k"])
    got = lab.w4a16_matmul(*given, zeros, group_size, **sizes, out=out)
    check_product("w4a16_matmul", got, x, w, f"Case: {case}")
    check_product("out after w4a16_matmul", out, x, w, f"Case: {case}")


def test_every_scale_reaches_its_own_columns(lab: Any) -> None:
    # One group at a time is not zero, and every row and group has a scale of its own.
    codes = torch.ones(3, 96, dtype=torch.int64)
    scales = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0], [3.0, 30.0, 300.0]])
    packed = torch.full((3, 48), 0x11, dtype=torch.uint8)
    x = torch.zeros(3, 96)
    for group in range(3):
        x[group, 32 * group + 5] = 1.0
    w = Weights(codes, packed, scales, None, 32, scales.double().repeat_interleave(32, dim=1))
    for block_k in (32, None):
        got = lab.w4a16_matmul(x, packed, scales, None, 32, block_k=block_k)
        check_product("w4a16_matmul", got, x, w, "Column c of row n has scale [n, c // group_size].")


def test_columns_meet_their_own_weights(lab: Any) -> None:
    # x picks single columns, so that each result is one weight: even and odd ones, at a tile's ends and within.
    w = weights_of(4, 2, 64, True, seed=6)
    picked = [0, 1, 2, 31, 32, 33, 63, 64, 65, 126, 127]
    x = torch.zeros(len(picked), 128)
    x[range(len(picked)), picked] = 1.0
    for block_k in (32, 64):
        got = lab.w4a16_matmul(x, w.packed, w.scales, w.zeros, 64, block_k=block_k)
        advice = "Each row of x picks one column: low nibble for even, high nibble for odd columns."
        check_product(f"columns {picked}", got, x, w, advice)


def test_half_precision_sums_in_fp32(lab: Any) -> None:
    # The first group sums to 33,607 or so, where fp16 numbers are 32 apart; the second takes nearly all of it away.
    codes = torch.full((1, 128), 7, dtype=torch.int64)
    codes[:, 64:] = -7
    packed = torch.tensor([[0x77] * 32 + [0x99] * 32], dtype=torch.uint8)
    scales = torch.tensor([[1.0, 1.0]])
    x = torch.full((2, 128), 75.0, dtype=torch.float16)
    x[:, 64:] = 74.9375
    x[1, 5] = 76.0
    w = Weights(codes, packed, scales, None, 64, codes.double())
    right = x.double() @ w.right.T
    got = lab.w4a16_matmul(x, packed, scales, None, 64)
    advice = "Keep products and accumulator in fp32; fp16 loses the small terms of a large sum."
    check_close("w4a16_matmul", got, right, scale=float(right.abs().max()), dtype=torch.float16, advice=advice)


@pytest.mark.parametrize(("block_m", "block_n", "block_k"), [(16, 16, 32), (16, 32, 64), (32, 16, 64)])
def test_packed_weights_are_all_that_is_read(lab: Any, block_m: int, block_n: int, block_k: int) -> None:
    rows, out_features, in_features = 20, 33, 128
    for has_zeros, dtype in ((True, torch.float16), (False, torch.float32)):
        w = weights_of(out_features, 2, 64, has_zeros, torch.float16, seed=8)
        x = activations(rows, in_features, dtype)
        sizes = dict(block_m=block_m, block_n=block_n, block_k=block_k)
        got, log = lab.observe("w4a16_matmul", x, w.packed, w.scales, w.zeros, 64, **sizes)
        check_product("w4a16_matmul", got, x, w, "")
        tiles_m, tiles_n = -(-rows // block_m), -(-out_features // block_n)
        parameters = out_features * in_features // block_k * (2 + int(has_zeros))
        loaded = tiles_m * (w.packed.numel() + parameters) + tiles_n * x.numel() * dtype.itemsize
        advice = "Half a byte a weight, once for each tile of rows; each byte is loaded once and gives two columns."
        stored = rows * out_features * dtype.itemsize
        check_traffic("w4a16_matmul", log, launches=1, loaded=loaded, stored=stored, advice=advice)
        wide = log.allocated(lambda shape: shape == (out_features, in_features))
        assert not wide, f"w4a16_matmul wrote out the whole weight matrix: {wide[0]}. Unpack within the kernel."


def test_w4a16_accesses_stay_inside(lab: Any) -> None:
    for rows, out_features, has_zeros in ((1, 33, True), (17, 5, False)):
        w = weights_of(out_features, 3, 32, has_zeros, seed=9)
        x = activations(rows, 96)
        got, log = lab.observe("w4a16_matmul", x, w.packed, w.scales, w.zeros, 32, block_n=32)
        check_product("w4a16_matmul", got, x, w, "")
        check_accesses(f"w4a16_matmul of {rows} rows by {out_features}", log)


def test_the_w4a16_kernel_does_the_work(lab: Any) -> None:
    w = weights_of(6, 1, 64, True, seed=10)
    x = activations(3, 64)
    check_product("w4a16_matmul", lab.w4a16_matmul(x, w.packed, w.scales, w.zeros, 64), x, w, "")
    out = unwritten((3, 6), x.dtype)
    lab.without_launches("w4a16_matmul", x, w.packed, w.scales, w.zeros, 64, out=out)
    check_unwritten("w4a16_matmul", out)


def test_groups_that_do_not_divide_are_refused(lab: Any) -> None:
    # 576 is SmolLM2's hidden size: 9 groups of 64, 18 of 32, and no whole number of 128.
    w = weights_of(2, 9, 64, False, seed=11)
    x = activations(2, 576)
    check_product("w4a16_matmul", lab.w4a16_matmul(x, w.packed, w.scales, None, 64), x, w, "")
    got = lab.dequantize_int4(w.packed, w.scales, None, 64)
    check_close("dequantize_int4", got, w.right, scale=1.0, dtype=torch.float32)
    scales = torch.ones(2, 4)
    by_128 = "576 columns in groups of 128"
    check_refused(by_128, lambda: lab.w4a16_matmul(x, w.packed, scales, None, 128), mentions="576")
    check_refused(by_128, lambda: lab.dequantize_int4(w.packed, scales, None, 128), mentions="128")
    check_refused("groups of 48", lambda: lab.w4a16_matmul(x, w.packed, torch.ones(2, 12), None, 48))
    check_refused("8 scales a row for 9 groups", lambda: lab.w4a16_matmul(x, w.packed, w.scales[:, :8], None, 64))
    check_refused("zeros of another shape", lambda: lab.w4a16_matmul(x, w.packed, w.scales, w.packed[:, :8], 64))
    check_refused("x of 512 columns", lambda: lab.w4a16_matmul(x[:, :512], w.packed, w.scales, None, 64))
    check_refused("tiles wider than a group", lambda: lab.w4a16_matmul(x, w.packed, w.scales, None, 64, block_k=128))
    check_refused("tiles of 8 rows", lambda: lab.w4a16_matmul(x, w.packed, w.scales, None, 64, block_m=8))


def test_codes_that_four_bits_do_not_hold_are_refused(lab: Any) -> None:
    right = torch.tensor([[0x9F]], dtype=torch.uint8)
    check_equal("pack_int4((15, 9))", lab.pack_int4(torch.tensor([[15, 9]])), right)
    check_refused("code 16", lambda: lab.pack_int4(torch.tensor([[1, 16]])), mentions="16")
    check_refused("code -9", lambda: lab.pack_int4(torch.tensor([[-9, 0]])), mentions="-9")
    check_refused("codes -1 and 8", lambda: lab.pack_int4(torch.tensor([[-1, 8]])))
    check_refused("three columns", lambda: lab.pack_int4(torch.tensor([[1, 2, 3]])), mentions="3")
    check_refused("floats", lambda: lab.pack_int4(torch.tensor([[1.0, 2.0]])))


@pytest.mark.integration
def test_your_kernel_reads_what_you_packed(lab: Any) -> None:
    w = weights_of(9, 2, 32, False, seed=12)
    x = activations(4, 64)
    packed = lab.pack_int4(w.codes)
    check_product("w4a16_matmul of pack_int4", lab.w4a16_matmul(x, packed, w.scales, None, 32), x, w, "Both are yours.")
    got = x @ lab.dequantize_int4(packed, w.scales, None, 32).T
    check_product("x · dequantize_int4 of pack_int4", got, x, w, "Both are yours.")
