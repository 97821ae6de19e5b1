"""Task 8: FlashDecoding: any number of splits, one answer."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.attention_reference import (
    FAR,
    check_attention,
    check_lse,
    check_right_or_refused,
    qkv,
    seen_attention64,
    who_sees_whom,
)
from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_unwritten
from grader.judge.numerics import check_close
from grader.judge.refusal import check_refused
from labkit.instruments.operators import doing_the_job

pytestmark = pytest.mark.task(8)

CASES = pairwise(
    {
        "num_keys": [1, 15, 17, 32, 50],
        "num_splits": [1, 2, 3, 7],
        "head_dim": [40, 64, 80, 128],
        "heads": [(2, 2), (4, 2), (6, 2), (4, 1)],
        "block_k": [16, 32],
        "layout": ["contiguous", "tokens first", "channels first"],
        "dtype": [torch.float32, torch.float16],
        "scale": [None, 0.3],
    }
)
assert len(CASES) <= 24

DECODE, TWIN = "flash_decoding", "flash_decoding_torch"


def decode_inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    num_keys: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """One query per head, without its axis of tokens, and keys and values."""
    q, k, v = qkv(batch, heads, kv_heads, 1, num_keys, head_dim, dtype=dtype, seed=seed)
    return q.squeeze(2), k, v


def check_decode(
    what: str,
    got: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    advice: str = "",
    score_size: float = 1.0,
) -> None:
    """Against float64: a query that sees all keys."""
    assert isinstance(got, (tuple, list)) and len(got) == 2, f"{what} must return output and log-sum-exp, got {got!r}"
    with_tokens = tuple(part.unsqueeze(2) if isinstance(part, Tensor) else part for part in got)
    seen = who_sees_whom(1, k.shape[2])
    check_attention(what, with_tokens, q.unsqueeze(2), k, v, seen, scale, score_size=score_size, advice=advice)


def parts_of(q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Right partial results of the keys between bounds."""
    outs, lses = [], []
    for first, last in itertools.pairwise(bounds):
        out, lse = seen_attention64(
            q.unsqueeze(2), k[:, :, first:last], v[:, :, first:last], who_sees_whom(1, last - first)
        )
        outs.append(out.squeeze(2))
        lses.append(lse.squeeze(2))
    return torch.stack(outs, 2).float(), torch.stack(lses, 2).float()


def check_merge(what: str, got: object, q: Tensor, k: Tensor, v: Tensor, advice: str) -> None:
    """A merged result in fp32."""
    check_decode(what, got, q.float(), k, v, None, advice)


@pytest.mark.parametrize(
    ("programs", "tiles", "multiprocessors", "splits"),
    [
        (8, 1000, 132, 16),  # 16 · 8 = 128 programs fill 132 multiprocessors once
        (32, 1000, 132, 4),
        (8, 20, 132, 10),  # 16 splits would have up to 2 tiles, as 10 have
        (1, 5, 132, 5),
        (1, 1000, 132, 125),
        (200, 1000, 132, 1),
        (100, 1000, 132, 1),  # 2 splits would start a second wave
        (6, 64, 36, 6),
        (3, 1, 36, 1),
    ],
)
def test_splits_fill_one_wave(lab: Any, programs: int, tiles: int, multiprocessors: int, splits: int) -> None:
    got = lab.choose_num_splits(programs, tiles, multiprocessors)
    assert got == splits, (
        f"{programs} programs over {tiles} tiles on {multiprocessors} multiprocessors: {splits} splits, got {got}. "
        "Fill one wave, no more; then take no more splits than the same longest one needs."
    )


@pytest.mark.parametrize("call", ["merge_partials", "merge_partials_torch"])
@pytest.mark.parametrize("bounds", [[0, 9], [0, 4, 9], [0, 1, 2, 9], [0, 0, 5, 5, 9, 9]])
def test_merging_parts_gives_the_whole(lab: Any, bounds: list[int], call: str) -> None:
    q, k, v = decode_inputs(2, 4, 2, 9, 20, seed=len(bounds))
    partial_out, partial_lse = parts_of(q, k, v, bounds)
    got = getattr(lab, call)(partial_out, partial_lse, torch.float32)
    check_merge(call, got, q, k, v, f"Parts end at keys {bounds[1:]}; each weighs exp(its log-sum-exp − the total's).")
    order = torch.randperm(len(bounds) - 1, generator=torch.Generator().manual_seed(0))
    got = getattr(lab, call)(partial_out[:, :, order], partial_lse[:, :, order], torch.float32)
    check_merge(call, got, q, k, v, "The order of the parts doesn't matter.")


@pytest.mark.parametrize("call", ["merge_partials", "merge_partials_torch"])
def test_empty_parts_weigh_nothing(lab: Any, call: str) -> None:
    q, k, v = decode_inputs(1, 2, 1, 5, 16, seed=2)
    full_out, full_lse = parts_of(q, k, v, [0, 5])
    empty_out, empty_lse = torch.zeros_like(full_out), torch.full_like(full_lse, -math.inf)
    for places in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        out = torch.cat([full_out if full else empty_out for full in places], 2)
        lse = torch.cat([full_lse if full else empty_lse for full in places], 2)
        got = getattr(lab, call)(out, lse, torch.float32)
        check_merge(call, got, q, k, v, f"Of three parts those marked 0 in {places} are empty.")
    # The first head has no key in any part, the second has.
    out, lse = (torch.cat([t, t], 2) for t in (full_out.clone(), full_lse.clone()))
    out[:, 0], lse[:, 0] = 0.0, -math.inf
    lse[:, 1, 1] = -math.inf
    merged, total = getattr(lab, call)(out, lse, torch.float32)
    advice = "Where no part has a key, the output is 0 and the log-sum-exp -inf, never NaN."
    check_close(call, merged, out[:, :, 0].double(), scale=float(out.abs().max()), dtype=torch.float32, advice=advice)
    check_lse(f"{call}: the log-sum-exp", total, lse[:, :, 0].double(), 8.0, advice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_decode_twin_matches_float64(lab: Any, num_splits: int, dtype: torch.dtype) -> None:
    for num_keys in (1, 16, 37):
        q, k, v = decode_inputs(2, 6, 2, num_keys, 20, dtype, seed=3)
        got = lab.flash_decoding_torch(q, k, v, scale=0.3, num_splits=num_splits, block_k=16)
        check_decode(f"{TWIN} of {num_keys} keys", got, q, k, v, 0.3)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_decode_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    heads, kv_heads = case["heads"]
    q, k, v = decode_inputs(2, heads, kv_heads, case["num_keys"], case["head_dim"], case["dtype"], seed=4)
    given = [q, k, v]
    if case["layout"] == "tokens first":
        given[1:] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    if case["layout"] == "channels first":
        given = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)]
    got = lab.flash_decoding(*given, scale=case["scale"], num_splits=case["num_splits"], block_k=case["block_k"])
    check_decode(DECODE, got, q, k, v, case["scale"], f"Case: {case}")


@pytest.mark.parametrize("num_keys", [0, 1, 40])
def test_any_number_of_splits_gives_one_answer(lab: Any, num_keys: int) -> None:
    q, k, v = decode_inputs(1, 2, 1, num_keys, 16, seed=5)
    for num_splits in (1, 2, 3, 4, 5, 9, None):
        got = lab.flash_decoding(q, k, v, num_splits=num_splits, block_k=16)
        advice = "Splits take whole tiles; with more splits than tiles the last ones are empty and must weigh nothing."
        check_decode(f"{DECODE} of {num_keys} keys in {num_splits} splits", got, q, k, v, None, advice)
        got = lab.flash_decoding_torch(q, k, v, num_splits=num_splits or 1, block_k=16)
        check_decode(f"{TWIN} of {num_keys} keys in {num_splits} splits", got, q, k, v, None, advice)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("sign", [1, -1])
def test_splits_far_from_zero_stay_finite(lab: Any, sign: int, order: int) -> None:
    q, k, v = decode_inputs(1, 2, 1, 40, 16, seed=6)
    q = torch.full_like(q, 125.0)
    steps = order * torch.arange(40.0).div(512)
    k = (sign * 50.0 + steps).reshape(1, 1, 40, 1).expand_as(v).contiguous()
    advice = f"All scores are near {sign * 100_000:,}: subtract the largest log-sum-exp before exp, in the merge too."
    for num_splits in (1, 3):
        got = lab.flash_decoding(q, k, v, scale=1.0, num_splits=num_splits, block_k=16)
        check_decode(f"{DECODE} in {num_splits} splits", got, q, k, v, 1.0, advice, FAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_key_is_read_once_for_its_group(lab: Any, dtype: torch.dtype) -> None:
    q, k, v = decode_inputs(2, 6, 2, 50, 40, dtype, seed=7)
    for num_splits in (1, 3, 6):
        got, log = lab.observe(DECODE, q, k, v, num_splits=num_splits, block_k=16)
        check_decode(DECODE, got, q, k, v)
        names = [launch.kernel for launch in log.launches]
        assert names == ["flash_decoding_kernel", "merge_partials_kernel"], f"{DECODE} started the kernels {names}"
        for name, tensor in (("k_ptr", k), ("v_ptr", v)):
            loaded, right = log.launches[0].tensor(name).bytes_loaded, tensor.numel() * dtype.itemsize
            assert loaded == right, (
                f"{num_splits} splits loaded {loaded} bytes of {name}, which has {right}: every key is needed once, by "
                "one split, for all query heads of its group"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_accesses_stay_inside(lab: Any, dtype: torch.dtype) -> None:
    q, k, v = decode_inputs(2, 3, 1, 21, 40, dtype, seed=8)
    for num_splits in (1, 2, 4):
        got, log = lab.observe(DECODE, q, k, v, num_splits=num_splits, block_k=16)
        check_decode(DECODE, got, q, k, v)
        check_accesses(f"{DECODE} in {num_splits} splits", log)


def test_the_decode_kernels_do_the_work(lab: Any) -> None:
    q, k, v = decode_inputs(1, 2, 1, 20, 16, seed=9)
    got, log = lab.observe(DECODE, q, k, v, num_splits=2, block_k=16)
    check_decode(DECODE, got, q, k, v)
    library = doing_the_job(log.operators, "attention", "matmul", "softmax")
    assert not library, f"{DECODE} ran {', '.join(library)} outside of your kernels, which are to do that"
    check_unwritten(DECODE, *lab.without_launches(DECODE, q, k, v, num_splits=2, block_k=16))
    parts = parts_of(q, k, v, [0, 7, 20])
    check_unwritten("merge_partials", *lab.without_launches("merge_partials", *parts, torch.float32))


def test_decode_refuses_what_does_not_fit(lab: Any) -> None:
    q, k, v = decode_inputs(2, 4, 2, 5, 16, seed=10)
    check_decode(DECODE, lab.flash_decoding(q, k, v), q, k, v)
    for call in (lab.flash_decoding, lab.flash_decoding_torch):
        check_refused("q with 4 axes", lambda call=call: call(q.unsqueeze(2), k, v))
        check_refused("3 query heads on 2 kv heads", lambda call=call: call(q[:, :3], k, v))
        check_refused("another batch size in q", lambda call=call: call(q[:1], k, v))
        check_refused("no split", lambda call=call: call(q, k, v, num_splits=0))
        check_refused("a tile of 8 keys", lambda call=call: call(q, k, v, block_k=8))
    partial_out, partial_lse = parts_of(q, k, v, [0, 3, 5])
    for merge in (lab.merge_partials, lab.merge_partials_torch):
        check_merge("merging", merge(partial_out, partial_lse, torch.float32), q, k, v, "")
        check_refused(
            "partial results of different shapes",
            lambda merge=merge: merge(partial_out, partial_lse[:, :, :1], torch.float32),
        )
        check_refused(
            "partial results in fp16", lambda merge=merge: merge(partial_out.half(), partial_lse, torch.float32)
        )
    check_refused("0 programs", lambda: lab.choose_num_splits(0, 5, 132))
    low = [tensor.bfloat16() for tensor in (q, k, v)]
    check_right_or_refused(lambda: lab.flash_decoding(*low), lambda got: check_decode(DECODE, got, *low))


@pytest.mark.integration
def test_your_decode_agrees_with_your_forward_pass(lab: Any) -> None:
    q, k, v = decode_inputs(2, 4, 2, 37, 16, seed=11)
    out, lse = lab.flash_attention_forward(q.unsqueeze(2), k, v, causal=True, block_q=16, block_k=16)
    check_decode("your flash_attention_forward", (out.squeeze(2), lse.squeeze(2)), q, k, v, None, "Task 6.")
    # Any attention's output and log-sum-exp are a part: those of two halves of the keys merge.
    halves = [
        lab.flash_attention_forward(q.unsqueeze(2), k[:, :, part], v[:, :, part], block_q=16, block_k=16)
        for part in (slice(0, 20), slice(20, 37))
    ]
    partial_out, partial_lse = (torch.cat([half[index] for half in halves], dim=2) for index in (0, 1))
    check_merge("your merged halves", lab.merge_partials(partial_out, partial_lse, torch.float32), q, k, v, "")
    check_decode(DECODE, lab.flash_decoding(q, k, v, num_splits=3, block_k=16), q, k, v)
