"""Task 7: FlashAttention's backward pass against float64 autograd, by kernels and through autograd."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.attention_reference import (
    FAR,
    LAYOUTS,
    check_gradients,
    check_right_or_refused,
    forward_results,
    laid_out,
    qkv,
    who_sees_whom,
)
from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_unwritten
from grader.judge.refusal import check_refused
from labkit.instruments.operators import doing_the_job

pytestmark = pytest.mark.task(7)

CASES = pairwise(
    {
        "lengths": [(1, 15), (16, 33), (17, 16), (34, 18)],
        "head_dim": [40, 64, 80, 128],
        "heads": [(2, 2), (2, 1), (3, 1), (4, 1)],
        "tiles": [(16, 16), (16, 32), (32, 16)],
        "causal": [True, False],
        "layout": LAYOUTS,
        "dtype": [torch.float32, torch.float16],
        "scale": [None, 0.3],
    }
)
assert len(CASES) <= 24

BACKWARD, TWIN = "flash_attention_backward", "flash_attention_backward_torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (17, 37), (37, 17)])
def test_backward_twin_matches_float64(
    lab: Any, num_queries: int, num_keys: int, causal: bool, dtype: torch.dtype
) -> None:
    q, k, v = qkv(2, 6, 2, num_queries, num_keys, 20, dtype=dtype, seed=1)
    seen = who_sees_whom(num_queries, num_keys, causal=causal)
    out, lse, grad_out = forward_results(q, k, v, seen, 0.3)
    got = lab.flash_attention_backward_torch(q, k, v, out, lse, grad_out, causal=causal, scale=0.3, block_k=16)
    check_gradients(TWIN, got, q, k, v, grad_out, seen, 0.3)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_backward_kernels_match_float64(lab: Any, case: dict[str, Any]) -> None:
    (num_queries, num_keys), (heads, kv_heads) = case["lengths"], case["heads"]
    q, k, v = qkv(2, heads, kv_heads, num_queries, num_keys, case["head_dim"], dtype=case["dtype"], seed=2)
    seen = who_sees_whom(num_queries, num_keys, causal=case["causal"])
    out, lse, grad_out = forward_results(q, k, v, seen, case["scale"])
    (given_q, given_out), (given_k, given_v) = laid_out(case["layout"], [(q, out), (k, v)])
    # Autograd hands over a gradient in whatever layout it has, so it gets the next one.
    other_layout = LAYOUTS[(LAYOUTS.index(case["layout"]) + 1) % len(LAYOUTS)]
    [(given_grad, _)] = laid_out(other_layout, [(grad_out, torch.full_like(grad_out, float("nan")))])
    block_q, block_k = case["tiles"]
    got = lab.flash_attention_backward(
        given_q, given_k, given_v, given_out, lse, given_grad,
        causal=case["causal"], scale=case["scale"], block_q=block_q, block_k=block_k,
    )  # fmt: skip
    check_gradients(BACKWARD, got, q, k, v, grad_out, seen, case["scale"], advice=f"Case: {case}")


@pytest.mark.parametrize(("num_queries", "num_keys"), [(20, 3), (35, 17)])
def test_queries_without_keys_have_no_gradient(lab: Any, num_queries: int, num_keys: int) -> None:
    q, k, v = qkv(1, 2, 1, num_queries, num_keys, 16, seed=3)
    seen = who_sees_whom(num_queries, num_keys)
    out, lse, grad_out = forward_results(q, k, v, seen)
    advice = "The first queries see nothing: their log-sum-exp is -inf, dq is 0, and dk and dv get nothing from them."
    for call, tiles in ((BACKWARD, {"block_q": 16, "block_k": 16}), (TWIN, {"block_k": 16})):
        got = getattr(lab, call)(q, k, v, out, lse, grad_out, causal=True, **tiles)
        check_gradients(call, got, q, k, v, grad_out, seen, advice=advice)


@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_of_scores_far_from_zero_stay_finite(lab: Any, sign: int) -> None:
    q, k, v = qkv(1, 2, 1, 19, 21, 16, seed=4)
    q = torch.full_like(q, 125.0)
    k = (sign * 50.0 + torch.arange(21.0).div(64)).reshape(1, 1, 21, 1).expand_as(v).contiguous()
    advice = (
        f"All scores are near {sign * 100_000:,}. A key or query that isn't there has the score 0 in a tile, and "
        "exp(0 − log_sum_exp) overflows: hide it before exp."
    )
    for causal in (True, False):
        seen = who_sees_whom(19, 21, causal=causal)
        out, lse, grad_out = forward_results(q, k, v, seen, 1.0)
        got = lab.flash_attention_backward(
            q, k, v, out, lse, grad_out, causal=causal, scale=1.0, block_q=16, block_k=16
        )  # fmt: skip
        check_gradients(BACKWARD, got, q, k, v, grad_out, seen, 1.0, score_size=FAR, advice=advice)


def test_a_group_s_gradients_are_summed(lab: Any) -> None:
    q, k, v = qkv(2, 6, 2, 5, 7, 16, seed=5)
    seen = who_sees_whom(5, 7)
    for member in range(3):
        out, lse, grad_out = forward_results(q, k, v, seen)
        # One head of each group alone has a gradient; the sum over the group is its own.
        grad_out[:, [head for head in range(6) if head % 3 != member]] = 0.0
        got = lab.flash_attention_backward(q, k, v, out, lse, grad_out, causal=True, block_q=16, block_k=16)
        advice = f"Head {member} of each group of three has a gradient: dk and dv are the sum over the group."
        check_gradients(BACKWARD, got, q, k, v, grad_out, seen, advice=advice)


def test_no_weights_are_kept_for_the_backward_pass(lab: Any) -> None:
    q, k, v = qkv(1, 1, 1, 48, 64, 16, seed=6)
    seen = who_sees_whom(48, 64)
    out, lse, grad_out = forward_results(q, k, v, seen)
    got, log = lab.observe(BACKWARD, q, k, v, out, lse, grad_out, causal=True, block_q=16, block_k=16)
    check_gradients(BACKWARD, got, q, k, v, grad_out, seen)
    large = log.allocated(lambda shape: torch.Size(shape).numel() >= 48 * 64)
    assert not large, f"{BACKWARD} computes the weights again, tile by tile; it made {large[0]}"
    library = doing_the_job(log.operators, "attention", "matmul", "softmax")
    assert not library, f"{BACKWARD} ran {', '.join(library)} outside of your kernels, which are to do that"
    # Both kernels, every tile that a query sees: q, dO and O or delta on one side, k and v on the other.
    most = 2 * 4 * 16 * (3 * 48 + 2 * 64) + 4 * 4 * 16 * 64 * (48 // 16)
    assert log.bytes_loaded <= most, (
        f"{BACKWARD} loaded {log.bytes_loaded} bytes, where {most} would do even without skipping a tile"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_backward_accesses_stay_inside(lab: Any, dtype: torch.dtype) -> None:
    for causal, num_queries, num_keys in ((True, 18, 21), (False, 3, 17)):
        q, k, v = qkv(2, 2, 1, num_queries, num_keys, 40, dtype=dtype, seed=7)
        seen = who_sees_whom(num_queries, num_keys, causal=causal)
        out, lse, grad_out = forward_results(q, k, v, seen)
        got, log = lab.observe(BACKWARD, q, k, v, out, lse, grad_out, causal=causal, block_q=16, block_k=16)
        check_gradients(BACKWARD, got, q, k, v, grad_out, seen)
        check_accesses(f"{BACKWARD} of {num_queries} queries and {num_keys} keys", log)


def test_the_backward_kernels_do_the_work(lab: Any) -> None:
    q, k, v = qkv(1, 2, 1, 5, 9, 16, seed=8)
    seen = who_sees_whom(5, 9, causal=False)
    out, lse, grad_out = forward_results(q, k, v, seen)
    got = lab.flash_attention_backward(q, k, v, out, lse, grad_out, block_q=16, block_k=16)
    check_gradients(BACKWARD, got, q, k, v, grad_out, seen)
    unwritten = lab.without_launches(BACKWARD, q, k, v, out, lse, grad_out, block_q=16, block_k=16)
    check_unwritten(BACKWARD, *unwritten)


def test_backward_refuses_what_does_not_fit(lab: Any) -> None:
    q, k, v = qkv(2, 4, 2, 3, 5, 16, seed=9)
    seen = who_sees_whom(3, 5, causal=False)
    out, lse, grad_out = forward_results(q, k, v, seen)
    got = lab.flash_attention_backward(q, k, v, out, lse, grad_out, block_q=16, block_k=16)
    check_gradients(BACKWARD, got, q, k, v, grad_out, seen)

    def refused(what: str, *tensors: Tensor, **options: Any) -> None:
        for call in (BACKWARD, TWIN):
            check_refused(f"{call}: {what}", partial(getattr(lab, call), *tensors, **options))

    refused("3 query heads on 2 kv heads", q[:, :3], k, v, out[:, :3], lse[:, :3], grad_out[:, :3])
    refused("an output of another shape", q, k, v, out[:, :, :2], lse, grad_out)
    refused("a gradient in fp16", q, k, v, out, lse, grad_out.half())
    refused("a log-sum-exp in fp16", q, k, v, out, lse.half(), grad_out)
    refused("a log-sum-exp of another shape", q, k, v, out, lse[:, :, :2], grad_out)
    check_refused(
        "a tile of 8 queries",
        lambda: lab.flash_attention_backward(q, k, v, out, lse, grad_out, block_q=8, block_k=16),
    )
    low = [tensor.bfloat16() for tensor in (q, k, v)]
    low_out, low_lse, low_grad = forward_results(*low, seen)
    check_right_or_refused(
        lambda: lab.flash_attention_backward(*low, low_out, low_lse, low_grad),
        lambda got: check_gradients(BACKWARD, got, *low, low_grad, seen),
    )
