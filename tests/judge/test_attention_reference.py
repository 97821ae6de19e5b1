"""The reference attention against a second one, its gradients against differences, and what its checks refuse."""

from __future__ import annotations

import math

import pytest
import torch

from grader.judge.attention_reference import (
    LAYOUTS,
    attention_gradients,
    check_attention,
    check_gradients,
    check_lse,
    forward_results,
    laid_out,
    qkv,
    seen_attention64,
    who_sees_whom,
)
from grader.judge.reference import attention64


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "window", "rows"),
    [
        (2, 4, None, ["xxx.", "xxxx"]),
        (3, 2, None, ["..", "x.", "xx"]),
        (3, 4, 2, ["xx..", ".xx.", "..xx"]),
        (2, 3, 1, [".x.", "..x"]),
        (2, 0, None, ["", ""]),
    ],
)
def test_who_sees_whom(num_queries: int, num_keys: int, window: int | None, rows: list[str]) -> None:
    table = who_sees_whom(num_queries, num_keys, window=window)
    assert ["".join("x" if seen else "." for seen in row) for row in table.tolist()] == rows
    assert bool(who_sees_whom(num_queries, num_keys, causal=False).all())


def test_it_agrees_with_attention_query_by_query() -> None:
    for num_queries, num_keys in ((5, 9), (9, 5), (1, 1)):
        q, k, v = qkv(2, 6, 2, num_queries, num_keys, 8, seed=1)
        out, lse = seen_attention64(q, k, v, who_sees_whom(num_queries, num_keys), 0.3)
        assert float((out - attention64(q, k, v, 0.3)).abs().max()) < 1e-14
        assert torch.equal(lse == -math.inf, ~who_sees_whom(num_queries, num_keys).any(-1).expand_as(lse))


def test_gradients_are_slopes() -> None:
    q, k, v = (t.double() for t in qkv(1, 2, 1, 4, 3, 5, seed=2))
    seen = who_sees_whom(4, 3)
    grad_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).double()
    gradients = attention_gradients(q, k, v, grad_out, seen, None, torch.float64)
    for index, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(4)).double()
        step, results = 1e-6, []
        for sign in (1, -1):
            moved = [t + sign * step * direction if i == index else t for i, t in enumerate((q, k, v))]
            results.append(float((seen_attention64(*moved, seen)[0] * grad_out).sum()))
        assert (results[0] - results[1]) / (2 * step) == pytest.approx(float((gradient * direction).sum()), rel=1e-7)
        assert bool(gradient.isfinite().all())


def test_layouts_keep_values() -> None:
    q, k, v = qkv(2, 4, 2, 3, 5, 8, seed=5)
    strides = set()
    for layout in LAYOUTS:
        pairs = laid_out(layout, [(q, q + 1), (k, v)])
        assert torch.equal(pairs[0][0], q) and torch.equal(pairs[0][1], q + 1)
        assert torch.equal(pairs[1][0], k) and torch.equal(pairs[1][1], v)
        strides.add(pairs[1][0].stride())
    assert len(strides) == len(LAYOUTS)


def test_wrong_results_are_refused() -> None:
    q, k, v = qkv(1, 2, 1, 4, 3, 8, seed=6)
    seen = who_sees_whom(4, 3)
    out, lse, grad_out = forward_results(q, k, v, seen)
    check_attention("right", (out, lse), q, k, v, seen)
    with pytest.raises(AssertionError, match="output"):
        check_attention("wrong", (out * 1.01, lse), q, k, v, seen)
    with pytest.raises(AssertionError, match="log-sum-exp"):
        check_attention("wrong", (out, lse + 0.01), q, k, v, seen)
    with pytest.raises(AssertionError, match="-inf for rows without keys"):
        check_lse("wrong", lse.masked_fill(lse == -math.inf, 0.0), lse.double(), 1.0)
    with pytest.raises(AssertionError, match="must return output and log-sum-exp"):
        check_attention("wrong", out, q, k, v, seen)
    dq, dk, dv = (t.float() for t in attention_gradients(q, k, v, grad_out, seen, None, torch.float64))
    check_gradients("right", (dq, dk, dv), q, k, v, grad_out, seen)
    with pytest.raises(AssertionError, match="dk"):
        check_gradients("wrong", (dq, dk * 1.01, dv), q, k, v, grad_out, seen)
