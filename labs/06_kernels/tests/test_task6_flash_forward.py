"""Task 6: FlashAttention's forward pass against float64, and what it moves through memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.attention_reference import (
    FAR,
    LAYOUTS,
    check_attention,
    check_right_or_refused,
    laid_out,
    qkv,
    who_sees_whom,
)
from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_traffic, check_unwritten
from grader.judge.layouts import unwritten
from grader.judge.refusal import check_refused
from labkit.instruments.operators import doing_the_job

pytestmark = pytest.mark.task(6)

CASES = pairwise(
    {
        "lengths": [(1, 15), (16, 33), (17, 16), (40, 49)],
        "head_dim": [40, 64, 80, 128],
        "heads": [(2, 2), (2, 1), (6, 2), (4, 1)],
        "tiles": [(16, 16), (16, 32), (32, 16)],
        "causal": [True, False],
        "layout": LAYOUTS,
        "dtype": [torch.float32, torch.float16],
        "outliers": [False, True],
    }
)
assert len(CASES) <= 24

ATTENTION, TWIN = "flash_attention_forward", "flash_attention_forward_torch"


def visible_keys(num_queries: int, num_keys: int, block_q: int) -> int:
    """Keys that causal attention loads per head, counted query tile by query tile."""
    lasts = [min(first + block_q, num_queries) - 1 for first in range(0, num_queries, block_q)]
    return sum(max(0, last + num_keys - num_queries + 1) for last in lasts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (17, 37), (37, 17), (3, 0)])
def test_attention_twin_matches_float64(
    lab: Any, num_queries: int, num_keys: int, causal: bool, dtype: torch.dtype
) -> None:
    q, k, v = qkv(2, 6, 2, num_queries, num_keys, 20, dtype=dtype, seed=1)
    got = lab.flash_attention_forward_torch(q, k, v, causal=causal, scale=0.3, block_q=16, block_k=16)
    check_attention(TWIN, got, q, k, v, who_sees_whom(num_queries, num_keys, causal=causal), 0.3)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_attention_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    num_queries, num_keys = case["lengths"]
    heads, kv_heads = case["heads"]
    q, k, v = qkv(
        2, heads, kv_heads, num_queries, num_keys, case["head_dim"],
        dtype=case["dtype"], seed=2, outliers=case["outliers"],
    )  # fmt: skip
    (given_q, out), (given_k, given_v) = laid_out(case["layout"], [(q, unwritten(q.shape, q.dtype)), (k, v)])
    block_q, block_k = case["tiles"]
    got = lab.flash_attention_forward(
        given_q, given_k, given_v, causal=case["causal"], block_q=block_q, block_k=block_k, out=out
    )
    seen = who_sees_whom(num_queries, num_keys, causal=case["causal"])
    _, lse = check_attention(ATTENTION, got, q, k, v, seen, advice=f"Case: {case}")
    check_attention("out, after the call", (out, lse), q, k, v, seen, advice=f"Case: {case}")
    for name, before, after in (("q", q, given_q), ("k", k, given_k), ("v", v, given_v)):
        assert torch.equal(before, after), f"{ATTENTION} changed its argument {name} in place"


@pytest.mark.parametrize(("num_queries", "num_keys"), [(20, 3), (35, 16), (5, 0)])
def test_queries_without_keys_give_zero_and_minus_infinity(lab: Any, num_queries: int, num_keys: int) -> None:
    q, k, v = qkv(1, 2, 1, num_queries, num_keys, 16, seed=3)
    advice = "With more queries than keys the first ones see nothing: output 0, log-sum-exp -inf, never NaN."
    for causal in (True, False):
        got = lab.flash_attention_forward(q, k, v, causal=causal, block_q=16, block_k=16)
        seen = who_sees_whom(num_queries, num_keys, causal=causal)
        check_attention(f"{ATTENTION}, causal={causal}", got, q, k, v, seen, advice=advice)


@pytest.mark.parametrize("order", ["rising", "falling"])
@pytest.mark.parametrize("sign", [1, -1])
def test_attention_scores_far_from_zero_stay_finite(lab: Any, sign: int, order: str) -> None:
    q, k, v = qkv(1, 2, 1, 20, 37, 16, seed=4)
    steps = torch.arange(37.0) * 0.002
    # Scores near ±100,000 that lie apart by multiples of 31.
    q = torch.full_like(q, 125.0)
    k = (sign * 50.0 + (steps if order == "rising" else -steps)).mul(64).round().div(64).reshape(1, 1, 37, 1)
    k = k.expand_as(v).contiguous()
    advice = f"All scores are near {sign * 100_000:,}: subtract the maximum seen so far, and rescale when it rises."
    for causal in (True, False):
        got = lab.flash_attention_forward(q, k, v, causal=causal, scale=1.0, block_q=16, block_k=16)
        seen = who_sees_whom(20, 37, causal=causal)
        check_attention(ATTENTION, got, q, k, v, seen, 1.0, score_size=FAR, advice=advice)


def test_half_precision_products_sum_in_fp32(lab: Any) -> None:
    q, k, v = qkv(1, 2, 1, 5, 18, 128, dtype=torch.float16, seed=5)
    q, k = torch.full_like(q, 40.0), torch.full_like(k, 20.0)
    k[:, :, 1] = k[:, :, 17] = 40.0
    got = lab.flash_attention_forward(q, k, v, block_q=16, block_k=16)
    advice = "The products sum to 204,800 here and fp16 ends at 65,504: scores stay in fp32."
    check_attention(ATTENTION, got, q, k, v, who_sees_whom(5, 18, causal=False), advice=advice)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (6, 3), (4, 1)])
def test_kernel_heads_read_their_own_group(lab: Any, heads: int, kv_heads: int) -> None:
    q, k, v = qkv(2, heads, kv_heads, 2, 3, 16, seed=6)
    # Each kv head holds one value of its own, so the output tells which head was read.
    marks = torch.arange(1.0, 2 * kv_heads + 1).reshape(2, kv_heads, 1, 1)
    v = marks.expand_as(v).contiguous()
    got = lab.flash_attention_forward(q, k, v, block_q=16, block_k=16)
    advice = f"With {heads} query heads on {kv_heads} kv heads, heads 0 to {heads // kv_heads - 1} read kv head 0."
    check_attention(ATTENTION, got, q, k, v, who_sees_whom(2, 3, causal=False), advice=advice)


@pytest.mark.parametrize("scale", [0.0, -0.4, None])
def test_kernel_scale_replaces_the_default(lab: Any, scale: float | None) -> None:
    q, k, v = qkv(1, 2, 1, 3, 18, 20, seed=7)
    got = lab.flash_attention_forward(q, k, v, scale=scale, block_q=16, block_k=16)
    advice = "The scores are multiplied by scale, or by 1/sqrt(head_dim) for None; head_dim is not the padded tile's."
    check_attention(ATTENTION, got, q, k, v, who_sees_whom(3, 18, causal=False), scale, advice=advice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_moves_the_bytes_of_the_formula(lab: Any, dtype: torch.dtype) -> None:
    tokens, head_dim, heads = 64, 40, 3
    q, k, v = qkv(1, heads, 1, tokens, tokens, head_dim, dtype=dtype, seed=8)
    size, keys_and_values = dtype.itemsize, []
    for block_q in (16, 32):
        got, log = lab.observe(ATTENTION, q, k, v, block_q=block_q, block_k=16)
        check_attention(ATTENTION, got, q, k, v, who_sees_whom(tokens, tokens, causal=False))
        passes = tokens // block_q
        advice = "Per head: q once, k and v once for each query tile, the output once, four bytes of log-sum-exp a row."
        loaded = heads * size * (tokens * head_dim + passes * 2 * tokens * head_dim)
        stored = heads * (size * tokens * head_dim + 4 * tokens)
        check_traffic(
            f"{ATTENTION} in tiles of {block_q}", log, launches=1, loaded=loaded, stored=stored, advice=advice
        )
        keys_and_values.append(sum(log.launches[0].tensor(name).bytes_loaded for name in ("k_ptr", "v_ptr")))
    assert keys_and_values[0] == 2 * keys_and_values[1], (
        f"a query tile twice as large must halve what is loaded of k and v; it went from {keys_and_values[0]} to "
        f"{keys_and_values[1]} bytes"
    )


@pytest.mark.parametrize(("num_queries", "num_keys"), [(64, 64), (32, 64), (64, 32)])
def test_causal_tiles_are_skipped_exactly(lab: Any, num_queries: int, num_keys: int) -> None:
    q, k, v = qkv(1, 1, 1, num_queries, num_keys, 16, seed=9)
    got, log = lab.observe(ATTENTION, q, k, v, causal=True, block_q=16, block_k=16)
    check_attention(ATTENTION, got, q, k, v, who_sees_whom(num_queries, num_keys))
    loaded = 4 * 16 * (num_queries + 2 * visible_keys(num_queries, num_keys, 16))
    stored = 4 * 16 * num_queries + 4 * num_queries
    advice = "A key tile that no query of the tile sees is not loaded; one that a query sees is."
    check_traffic(f"causal {ATTENTION}", log, launches=1, loaded=loaded, stored=stored, advice=advice)


def test_no_score_matrix_exists(lab: Any) -> None:
    q, k, v = qkv(1, 1, 1, 48, 64, 16, seed=10)
    got, log = lab.observe(ATTENTION, q, k, v, causal=True, block_q=16, block_k=16)
    check_attention(ATTENTION, got, q, k, v, who_sees_whom(48, 64))
    large = log.allocated(lambda shape: torch.Size(shape).numel() >= 48 * 64)
    assert not large, f"{ATTENTION} may take memory that grows with T, not with T²; it made {large[0]}"
    library = doing_the_job(log.operators, "attention", "matmul", "softmax")
    assert not library, f"{ATTENTION} ran {', '.join(library)} outside of your kernel, which is to do that itself"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_accesses_stay_inside(lab: Any, dtype: torch.dtype) -> None:
    for causal, num_queries, num_keys in ((True, 18, 21), (False, 3, 17)):
        q, k, v = qkv(2, 2, 1, num_queries, num_keys, 40, dtype=dtype, seed=11)
        (given_q, _), (given_k, given_v) = laid_out("side by side", [(q, torch.zeros_like(q)), (k, v)])
        got, log = lab.observe(ATTENTION, given_q, given_k, given_v, causal=causal, block_q=16, block_k=16)
        check_attention(ATTENTION, got, q, k, v, who_sees_whom(num_queries, num_keys, causal=causal))
        check_accesses(f"{ATTENTION} of {num_queries} queries and {num_keys} keys", log)


def test_the_attention_kernel_does_the_work(lab: Any) -> None:
    q, k, v = qkv(1, 2, 1, 5, 9, 16, seed=12)
    got = lab.flash_attention_forward(q, k, v, block_q=16, block_k=16)
    check_attention(ATTENTION, got, q, k, v, who_sees_whom(5, 9, causal=False))
    out = unwritten(q.shape, q.dtype)
    _, lse = lab.without_launches(ATTENTION, q, k, v, block_q=16, block_k=16, out=out)
    check_unwritten(ATTENTION, out, lse)


def test_attention_refuses_what_does_not_fit(lab: Any) -> None:
    q, k, v = qkv(2, 4, 2, 3, 5, 16, seed=13)
    check_attention(ATTENTION, lab.flash_attention_forward(q, k, v), q, k, v, who_sees_whom(3, 5, causal=False))
    check_attention(TWIN, lab.flash_attention_forward_torch(q, k, v), q, k, v, who_sees_whom(3, 5, causal=False))

    def refused(what: str, *tensors: Tensor, **options: Any) -> None:
        check_refused(what, lambda: lab.flash_attention_forward(*tensors, **options))

    refused("q with 3 axes", q[0], k, v)
    refused("k and v of different lengths", q, k, v[:, :, :2])
    refused("another batch size in q", q[:1], k, v)
    refused("3 query heads on 2 kv heads", q[:, :3], k, v)
    refused("another head_dim in q", q[..., :8], k, v)
    refused("q in fp16, k and v in fp32", q.half(), k, v)
    refused("float64", q.double(), k.double(), v.double())
    refused("a tile of 24 queries", q, k, v, block_q=24, block_k=16)
    refused("a tile of 8 keys", q, k, v, block_q=16, block_k=8)
    refused("one tile size of two", q, k, v, block_q=16)
    refused("an infinite scale", q, k, v, scale=float("inf"))
    refused("an output of another shape", q, k, v, out=torch.empty(2, 4, 3, 8))
    low = [tensor.bfloat16() for tensor in (q, k, v)]
    check_right_or_refused(
        lambda: lab.flash_attention_forward(*low),
        lambda got: check_attention(ATTENTION, got, *low, who_sees_whom(3, 5, causal=False)),
    )


@pytest.mark.integration
def test_your_kernel_agrees_with_your_online_mean(lab: Any) -> None:
    q, k, v = qkv(1, 1, 1, 20, 45, 16, seed=14)
    scores = q[0, 0] @ k[0, 0].T / 4

    def read_block(number: int) -> tuple[Tensor, Tensor]:
        part = slice(16 * number, 16 * number + 16)
        return scores[:, part], v[0, 0, part]

    seen = who_sees_whom(20, 45, causal=False)
    mean, lse = lab.online_mean(read_block, 3)
    check_attention("your online_mean", (mean[None, None], lse[None, None]), q, k, v, seen, advice="Task 1.")
    check_attention(ATTENTION, lab.flash_attention_forward(q, k, v, block_q=32, block_k=16), q, k, v, seen)
