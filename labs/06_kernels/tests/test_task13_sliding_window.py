"""Task 13: attention to the newest keys only, and the bytes that it saves."""

from __future__ import annotations

from functools import partial
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
from grader.judge.refusal import check_refused
from labkit.instruments.operators import doing_the_job

pytestmark = pytest.mark.task(13)

CASES = pairwise(
    {
        "lengths": [(1, 40), (16, 33), (17, 5), (49, 49)],
        "window": [1, 5, 16, 100],
        "head_dim": [40, 64, 80, 128],
        "heads": [(2, 2), (2, 1), (6, 2), (4, 1)],
        "tiles": [(16, 16), (16, 32), (32, 16)],
        "layout": LAYOUTS,
        "dtype": [torch.float32, torch.float16],
        "scale": [None, 0.3],
    }
)
assert len(CASES) <= 24

WINDOW, TWIN = "sliding_window_attention", "sliding_window_attention_torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [1, 7, 16, 50])
def test_window_twin_matches_float64(lab: Any, window: int, dtype: torch.dtype) -> None:
    for num_queries, num_keys in ((37, 37), (3, 20), (20, 3)):
        q, k, v = qkv(2, 6, 2, num_queries, num_keys, 20, dtype=dtype, seed=1)
        got = lab.sliding_window_attention_torch(q, k, v, window, scale=0.3, block_q=16)
        check_attention(TWIN, got, q, k, v, who_sees_whom(num_queries, num_keys, window=window), 0.3)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_window_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    (num_queries, num_keys), (heads, kv_heads) = case["lengths"], case["heads"]
    q, k, v = qkv(2, heads, kv_heads, num_queries, num_keys, case["head_dim"], dtype=case["dtype"], seed=2)
    (given_q, _), (given_k, given_v) = laid_out(case["layout"], [(q, torch.full_like(q, float("nan"))), (k, v)])
    block_q, block_k = case["tiles"]
    got = lab.sliding_window_attention(
        given_q, given_k, given_v, case["window"], scale=case["scale"], block_q=block_q, block_k=block_k
    )
    seen = who_sees_whom(num_queries, num_keys, window=case["window"])
    check_attention(WINDOW, got, q, k, v, seen, case["scale"], advice=f"Case: {case}")


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_holds_so_many_keys(lab: Any, window: int) -> None:
    q, k, v = qkv(1, 1, 1, 6, 9, 16, seed=3)
    # Equal scores, and values that are powers of two: the mean tells which keys were seen.
    q = torch.zeros_like(q)
    v = (2.0 ** torch.arange(9)).reshape(1, 1, 9, 1).expand_as(v).contiguous()
    got = lab.sliding_window_attention(q, k, v, window, block_q=16, block_k=16)
    advice = f"A window of {window} is the query's own key and the {window - 1} before it."
    check_attention(WINDOW, got, q, k, v, who_sees_whom(6, 9, window=window), advice=advice)


@pytest.mark.parametrize("sign", [1, -1])
def test_window_scores_far_from_zero_stay_finite(lab: Any, sign: int) -> None:
    q, k, v = qkv(1, 2, 1, 40, 40, 16, seed=4)
    q = torch.full_like(q, 125.0)
    k = (sign * 50.0 + torch.arange(40.0).div(512)).reshape(1, 1, 40, 1).expand_as(v).contiguous()
    got = lab.sliding_window_attention(q, k, v, 5, scale=1.0, block_q=32, block_k=16)
    advice = f"All scores are near {sign * 100_000:,}; a row's first tile may hold no key of its window, the next does."
    check_attention(WINDOW, got, q, k, v, who_sees_whom(40, 40, window=5), 1.0, score_size=FAR, advice=advice)


def test_tiles_outside_of_the_window_are_skipped(lab: Any) -> None:
    for num_queries, num_keys in ((64, 64), (32, 64)):
        q, k, v = qkv(1, 1, 1, num_queries, num_keys, 16, seed=5)
        got, log = lab.observe(WINDOW, q, k, v, 17, block_q=16, block_k=16)
        check_attention(WINDOW, got, q, k, v, who_sees_whom(num_queries, num_keys, window=17))
        # The first query of a tile at position p sees p − 16 … p: one tile to the left of its own, where there is one.
        offset = num_keys - num_queries
        tiles = sum(2 if first + offset > 0 else 1 for first in range(0, num_queries, 16))
        advice = "Key tiles that are too old for every query of a tile are not loaded, no more than those too new."
        row = 4 * 16
        loaded = row * (num_queries + 2 * 16 * tiles)
        stored = row * num_queries + 4 * num_queries
        check_traffic(WINDOW, log, launches=1, loaded=loaded, stored=stored, advice=advice)


def test_window_accesses_stay_inside(lab: Any) -> None:
    for num_queries, num_keys in ((18, 21), (3, 37), (20, 3)):
        q, k, v = qkv(2, 2, 1, num_queries, num_keys, 40, seed=6)
        got, log = lab.observe(WINDOW, q, k, v, 6, block_q=16, block_k=16)
        check_attention(WINDOW, got, q, k, v, who_sees_whom(num_queries, num_keys, window=6))
        check_accesses(f"{WINDOW} of {num_queries} queries and {num_keys} keys", log)


def test_the_window_kernel_does_the_work(lab: Any) -> None:
    q, k, v = qkv(1, 2, 1, 9, 9, 16, seed=7)
    got, log = lab.observe(WINDOW, q, k, v, 4, block_q=16, block_k=16)
    check_attention(WINDOW, got, q, k, v, who_sees_whom(9, 9, window=4))
    library = doing_the_job(log.operators, "attention", "matmul", "softmax")
    assert not library, f"{WINDOW} ran {', '.join(library)} outside of your kernel, which is to do that"
    check_unwritten(WINDOW, *lab.without_launches(WINDOW, q, k, v, 4, block_q=16, block_k=16))


def test_window_refuses_what_does_not_fit(lab: Any) -> None:
    q, k, v = qkv(2, 4, 2, 3, 5, 16, seed=8)
    seen = who_sees_whom(3, 5, window=2)
    check_attention(WINDOW, lab.sliding_window_attention(q, k, v, 2), q, k, v, seen)
    check_attention(TWIN, lab.sliding_window_attention_torch(q, k, v, 2), q, k, v, seen)

    def refused(what: str, *arguments: Tensor | int) -> None:
        check_refused(what, partial(lab.sliding_window_attention, *arguments))
        check_refused(what, partial(lab.sliding_window_attention_torch, *arguments))

    refused("a window of no key", q, k, v, 0)
    refused("q with 3 axes", q[0], k, v, 2)
    refused("3 query heads on 2 kv heads", q[:, :3], k, v, 2)
    refused("k and v of different lengths", q, k, v[:, :, :2], 2)
    check_refused("a tile of 8 keys", lambda: lab.sliding_window_attention(q, k, v, 2, block_k=8))
    low = [tensor.bfloat16() for tensor in (q, k, v)]
    check_right_or_refused(
        lambda: lab.sliding_window_attention(*low, 2), lambda got: check_attention(WINDOW, got, *low, seen)
    )


@pytest.mark.integration
def test_a_wide_window_is_your_causal_attention(lab: Any) -> None:
    q, k, v = qkv(1, 4, 2, 20, 37, 16, seed=9)
    seen = who_sees_whom(20, 37)
    causal = lab.flash_attention_forward(q, k, v, causal=True, block_q=16, block_k=16)
    check_attention("your flash_attention_forward", causal, q, k, v, seen, advice="Task 6.")
    wide = lab.sliding_window_attention(q, k, v, 37, block_q=16, block_k=16)
    check_attention(f"{WINDOW} over all keys", wide, q, k, v, seen)
