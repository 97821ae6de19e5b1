"""Task 2: attention over cached keys, against float64 mathematics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.covering import pairwise
from grader.judge.numerics import check_close, check_equal
from grader.judge.reference import attention64, plain_attention
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig

pytestmark = pytest.mark.task(2)

CASES = pairwise(
    {
        "head_dim": [40, 64, 80, 128],
        "lengths": [(1, 1), (1, 17), (6, 6), (15, 33), (5, 3)],
        "group": [1, 2, 3, 4],
        "strides": ["contiguous", "tokens first", "padded"],
        "dtype": [torch.float32, torch.float16],
        "kv_heads": [1, 3],
        "outliers": [False, True],
        "batch": [1, 2],
    }
)
assert len(CASES) <= 24


def qkv(
    group: int,
    kv_heads: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values of both signs."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, group * kv_heads, num_queries), (batch, kv_heads, num_keys), (batch, kv_heads, num_keys)]
    q, k, v = (torch.randn(*shape, head_dim, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def laid_out(tensor: Tensor, strides: str) -> Tensor:
    """The same values in another memory layout."""
    if strides == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "padded":
        room = torch.full((*tensor.shape[:2], tensor.shape[2] + 3, tensor.shape[3] + 2), float("nan")).to(tensor.dtype)
        room[:, :, 1 : 1 + tensor.shape[2], : tensor.shape[3]] = tensor
        return room[:, :, 1 : 1 + tensor.shape[2], : tensor.shape[3]]
    return tensor


def check_attention(what: str, got: object, q: Tensor, k: Tensor, v: Tensor, scale: float | None, advice: str) -> None:
    """Against float64; the scale of a weighted mean of values is the largest value."""
    check_close(
        what,
        got,
        attention64(q, k, v, scale),
        scale=float(v.abs().max()) if v.numel() else 1.0,
        dtype=q.dtype,
        plain=plain_attention(q, k, v, scale),
        inputs=(q, k, v),
        advice=advice,
    )


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "rows"),
    [
        (1, 1, ["x"]),
        (1, 4, ["xxxx"]),
        (2, 4, ["xxx.", "xxxx"]),
        (3, 3, ["x..", "xx.", "xxx"]),
        (3, 5, ["xxx..", "xxxx.", "xxxxx"]),
        (4, 2, ["..", "..", "x.", "xx"]),
        (2, 0, ["", ""]),
        (0, 3, []),
    ],
)
def test_mask_is_bottom_right_aligned(lab: Any, num_queries: int, num_keys: int, rows: list[str]) -> None:
    right = torch.tensor([[mark == "x" for mark in row] for row in rows], dtype=torch.bool)
    advice = "The last query sees all keys, each query before it one key less; True means: may attend."
    got = lab.causal_mask(num_queries, num_keys)
    check_equal(f"causal_mask({num_queries}, {num_keys})", got, right.reshape(num_queries, num_keys), advice)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_attention_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    num_queries, num_keys = case["lengths"]
    q, k, v = qkv(
        case["group"], case["kv_heads"], num_queries, num_keys, case["head_dim"], batch=case["batch"],
        dtype=case["dtype"], seed=17,
    )  # fmt: skip
    if case["outliers"]:
        for tensor in (q, k, v):
            tensor[..., 3] *= 12
    given = [laid_out(tensor, case["strides"]) for tensor in (q, k, v)]
    got = lab.cached_attention(*given)
    check_attention("cached_attention", got, q, k, v, None, f"Case: {case}")
    for name, before, after in zip("qkv", (q, k, v), given, strict=True):
        assert torch.equal(before, after), f"cached_attention changed its argument {name} in place"


@pytest.mark.parametrize("pieces", [(11,), (1,) * 11, (4, 7), (10, 1), (1, 3, 5, 2)])
def test_any_split_equals_the_whole(lab: Any, pieces: tuple[int, ...]) -> None:
    q, k, v = qkv(3, 2, 11, 11, 16, seed=5)
    parts, end = [], 0
    for count in pieces:
        start, end = end, end + count
        parts.append(lab.cached_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end]))
    advice = "New token i of a piece has the position (old tokens + i); it sees all old tokens and itself."
    check_attention(f"attention in pieces of {pieces} tokens", torch.cat(parts, dim=2), q, k, v, None, advice)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 2), (6, 3), (3, 1)])
def test_query_heads_read_their_own_group(lab: Any, heads: int, kv_heads: int) -> None:
    q, k, v = qkv(heads // kv_heads, kv_heads, 2, 5, 8, batch=2, seed=3)
    # Each kv head holds one value of its own, so the output tells which head was read.
    marks = torch.arange(1, 2 * kv_heads + 1).reshape(2, kv_heads).float()
    v = marks[:, :, None, None].expand_as(v).contiguous()
    got = lab.cached_attention(q, k, v)
    advice = f"With {heads} query heads on {kv_heads} kv heads, heads 0..{heads // kv_heads - 1} read kv head 0."
    check_attention("the kv head read by each query head", got, q, k, v, None, advice)


def test_later_tokens_are_invisible(lab: Any) -> None:
    q, k, v = qkv(2, 2, 4, 6, 8, seed=8)
    before = lab.cached_attention(q, k, v)
    check_attention("cached_attention", before, q, k, v, None, "")
    for token in (3, 4, 5):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, token] += 1.5
        other_v[:, :, token] -= 2.5
        change = (lab.cached_attention(q, other_k, other_v) - before).abs().amax(dim=(0, 1, 3))
        for row in range(4):
            sees = token <= row + 2
            assert (float(change[row]) > 1e-3) == sees, (
                f"4 queries are the last of 6 tokens; key and value of token {token} were changed and query {row} "
                f"(token {row + 2}) changed by {float(change[row]):.3g}: it must {'' if sees else 'not '}see that token"
            )


@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 3), (3, 1), (4, 0)])
def test_queries_without_keys_give_zero(lab: Any, num_queries: int, num_keys: int) -> None:
    q, k, v = qkv(2, 3, num_queries + 2, num_keys + 2, 8, seed=2)
    advice = "A softmax over nothing is NaN in torch; a query without keys must give 0, and must not spoil others."
    got = lab.cached_attention(q, k, v)
    check_attention(f"{num_queries + 2} queries over {num_keys + 2} keys", got, q, k, v, None, advice)
    q, k, v = q[:, :, :num_queries], k[:, :, :num_keys], v[:, :, :num_keys]
    got = lab.cached_attention(q, k, v)
    check_attention(f"{num_queries} queries over {num_keys} keys", got, q, k, v, None, advice)


@pytest.mark.parametrize("scale", [0.0, 0.37, 1.0, None])
def test_scale_replaces_the_default(lab: Any, scale: float | None) -> None:
    q, k, v = qkv(2, 2, 3, 7, 20, seed=4)
    got = lab.cached_attention(q, k, v, scale)
    advice = "The scores are multiplied by scale, or by 1/sqrt(head_dim) for None; 0 is a scale like any other."
    check_attention(f"attention with scale={scale}", got, q, k, v, scale, advice)


@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_stay_finite(lab: Any, sign: int) -> None:
    q, k, v = qkv(2, 1, 3, 6, 4, seed=6)
    # Scores around ±100,000 that differ by a few units: exp of them overflows, or is 0 for a whole row.
    q = torch.full_like(q, 250.0)
    k = sign * (100.0 + torch.arange(6).mul(0.002).reshape(1, 1, 6, 1).expand_as(k))
    got = lab.cached_attention(q, k, v, 1.0)
    advice = f"All scores are near {sign * 100_000:,}; a softmax may depend on differences only."
    check_attention("attention with large scores", got, q, k, v, 1.0, advice)


def test_half_precision_scores_do_not_overflow(lab: Any) -> None:
    q, k, v = qkv(2, 2, 2, 5, 128, dtype=torch.float16, seed=9)
    q, k = torch.full_like(q, 40.0), torch.full_like(k, 20.0)
    k[:, :, 1] = k[:, :, 3] = 40.0
    got = lab.cached_attention(q, k, v)
    advice = "The products sum to 204,800 here and fp16 ends at 65,504: convert to fp32 before multiplying q and k."
    check_attention("fp16 attention", got, q, k, v, None, advice)


def test_mismatched_tensors_are_refused(lab: Any) -> None:
    q, k, v = qkv(2, 2, 2, 3, 8, batch=2, seed=1)
    check_attention("cached_attention", lab.cached_attention(q, k, v), q, k, v, None, "")
    check_refused("q with 3 axes", lambda: lab.cached_attention(q[0], k, v))
    check_refused("k and v of different lengths", lambda: lab.cached_attention(q, k, v[:, :, :2]))
    check_refused("another head_dim in q", lambda: lab.cached_attention(q[..., :6], k, v))
    check_refused("another batch size in q", lambda: lab.cached_attention(q[:1], k, v))
    check_refused("3 query heads on 2 kv heads", lambda: lab.cached_attention(q[:, :3], k, v))
    check_refused("q in fp16, k and v in fp32", lambda: lab.cached_attention(q.half(), k, v))
    check_refused("-1 queries", lambda: lab.causal_mask(-1, 3))


@pytest.mark.integration
@pytest.mark.parametrize("pieces", [(3, 1, 2), (1, 5)])
def test_attention_over_your_own_cache(lab: Any, pieces: tuple[int, ...]) -> None:
    config = ModelConfig.tiny(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8)
    cache = lab.KVCache(config, 9)
    q, k, v = qkv(3, 2, sum(pieces), sum(pieces), 8, seed=11)
    parts, end = [], 0
    for count in pieces:
        start, end = end, end + count
        keys, values = cache.append(1, k[:, :, start:end], v[:, :, start:end])
        parts.append(lab.cached_attention(q[:, :, start:end], keys, values))
    advice = "Attention passes alone if the other tests of this task do: then look at what append returns."
    check_attention(f"your attention over your cache, pieces {pieces}", torch.cat(parts, 2), q, k, v, None, advice)
