"""Task 7: the two passes as one function that autograd can differentiate."""

from __future__ import annotations

from typing import Any

import pytest

from grader.judge.attention_reference import check_gradients, forward_results, qkv, seen_attention64, who_sees_whom
from grader.judge.numerics import check_close

pytestmark = pytest.mark.task(7)


@pytest.mark.integration
@pytest.mark.parametrize("causal", [True, False])
def test_autograd_finds_your_kernels(lab: Any, causal: bool) -> None:
    q, k, v = qkv(2, 4, 2, 18, 21, 20, seed=10)
    seen = who_sees_whom(18, 21, causal=causal)
    _, _, grad_out = forward_results(q, k, v, seen)
    options = {"causal": causal, "scale": 0.3, "block_q": 16, "block_k": 16}
    right, _ = seen_attention64(q, k, v, seen, 0.3)
    got = lab.flash_attention(q, k, v, **options)
    check_close("flash_attention", got, right, scale=float(v.abs().max()), dtype=q.dtype, inputs=(q, v))
    gradients = lab.vjp("flash_attention", [q, k, v], grad_out, **options)
    advice = "The kernels pass alone if the other tests of this task do: then look at what forward saves and for whom."
    check_gradients("flash_attention by autograd", gradients, q, k, v, grad_out, seen, 0.3, advice=advice)
