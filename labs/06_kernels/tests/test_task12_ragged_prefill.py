"""Task 12: sequences of different lengths end to end, none of which sees another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.attention_reference import FAR, check_attention, check_right_or_refused, qkv, who_sees_whom
from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_unwritten
from grader.judge.refusal import check_refused
from labkit.instruments.operators import doing_the_job

pytestmark = pytest.mark.task(12)

CASES = pairwise(
    {
        "lengths": [
            ((5, 0, 17, 1), (5, 7, 33, 0)),
            ((16, 15), (16, 15)),
            ((1, 1, 1), (15, 1, 33)),
            ((17, 2), (3, 40)),
        ],
        "head_dim": [40, 64, 80, 128],
        "heads": [(2, 2), (2, 1), (6, 2), (4, 1)],
        "tiles": [(16, 16), (16, 32), (32, 16)],
        "causal": [True, False],
        "layout": ["contiguous", "joined", "channels first"],
        "dtype": [torch.float32, torch.float16],
        "bounds": [torch.int32, torch.int64],
    }
)
assert len(CASES) <= 24

PREFILL, TWIN = "ragged_prefill", "ragged_prefill_torch"


class Batch:
    """Sequences packed end to end.

    Args:
        num_queries: of each sequence.
        num_keys: of each sequence.
    """

    def __init__(
        self,
        num_queries: Sequence[int],
        num_keys: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        bounds: torch.dtype = torch.int32,
        seed: int = 0,
    ) -> None:
        self.sequences = [
            qkv(1, heads, kv_heads, nq, nk, head_dim, dtype=dtype, seed=seed + 10 * row)
            for row, (nq, nk) in enumerate(zip(num_queries, num_keys, strict=True))
        ]
        self.q, self.k, self.v = (
            torch.cat([t[0].transpose(0, 1) for t in part]) for part in zip(*self.sequences, strict=True)
        )
        self.num_queries = list(num_queries)
        self.cu_q, self.cu_k = (torch.tensor([0, *counts]).cumsum(0).to(bounds) for counts in (num_queries, num_keys))

    def arguments(self) -> tuple[Tensor, ...]:
        """q, k, v and both bounds."""
        return self.q, self.k, self.v, self.cu_q, self.cu_k

    def check(
        self,
        what: str,
        got: object,
        causal: bool = True,
        scale: float | None = None,
        advice: str = "",
        score_size: float = 1.0,
    ) -> None:
        """Each sequence against float64 by itself."""
        assert isinstance(got, (tuple, list)) and len(got) == 2, f"{what} must return output and log-sum-exp: {got!r}"
        out, lse = (t.split(self.num_queries) if isinstance(t, Tensor) else [t] * len(self.sequences) for t in got)
        for row, (q, k, v) in enumerate(self.sequences):
            parts = tuple(
                part.transpose(0, 1)[None] if isinstance(part, Tensor) else part for part in (out[row], lse[row])
            )
            seen = who_sees_whom(q.shape[2], k.shape[2], causal=causal)
            name = f"{what}, sequence {row} of {q.shape[2]} queries and {k.shape[2]} keys"
            check_attention(name, parts, q, k, v, seen, scale, score_size=score_size, advice=advice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_twin_matches_float64(lab: Any, causal: bool, dtype: torch.dtype) -> None:
    batch = Batch((5, 0, 17, 1, 6), (5, 7, 33, 0, 2), 6, 2, 20, dtype=dtype, seed=1)
    batch.check(TWIN, lab.ragged_prefill_torch(*batch.arguments(), causal=causal, scale=0.3), causal, 0.3)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_ragged_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    (num_queries, num_keys), (heads, kv_heads) = case["lengths"], case["heads"]
    options = {"dtype": case["dtype"], "bounds": case["bounds"], "seed": 2}
    batch = Batch(num_queries, num_keys, heads, kv_heads, case["head_dim"], **options)
    q, k, v, cu_q, cu_k = batch.arguments()
    if case["layout"] == "joined":
        # Keys and values as a joined projection leaves them, side by side behind each token.
        k, v = torch.cat([k, v], dim=1).split(kv_heads, dim=1)
    if case["layout"] == "channels first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    block_q, block_k = case["tiles"]
    got = lab.ragged_prefill(
        q, k, v, cu_q, cu_k, max(num_queries) + 3, causal=case["causal"], block_q=block_q, block_k=block_k
    )
    batch.check(PREFILL, got, case["causal"], advice=f"Case: {case}")


def test_no_sequence_sees_another(lab: Any) -> None:
    for row in range(3):
        batch = Batch((18, 5, 20), (18, 9, 20), 2, 1, 16, seed=3)
        q, k, v, cu_q, cu_k = batch.arguments()
        mine, keys = slice(int(cu_q[row]), int(cu_q[row + 1])), slice(int(cu_k[row]), int(cu_k[row + 1]))
        # Others' keys would outweigh all of one's own, and any weight at all makes their values NaN.
        poisoned = [torch.full_like(q, 1e4), torch.full_like(k, 1e4), torch.full_like(v, float("nan"))]
        for target, source, part in zip(poisoned, (q, k, v), (mine, keys, keys), strict=True):
            target[part] = source[part]
        got = lab.ragged_prefill(*poisoned, cu_q, cu_k, 20, block_q=16, block_k=16)
        out, lse = (t[mine].transpose(0, 1)[None] for t in got)
        q, k, v = batch.sequences[row]
        advice = (
            "All other sequences are poisoned. A tile reaching over a sequence's end must neither load nor store there."
        )
        check_attention(
            f"{PREFILL}, sequence {row}", (out, lse), q, k, v, who_sees_whom(q.shape[2], k.shape[2]), advice=advice
        )  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
def test_ragged_scores_far_from_zero_stay_finite(lab: Any, sign: int) -> None:
    batch = Batch((19, 3), (37, 2), 2, 1, 16, seed=4)
    for q, k, _ in batch.sequences:
        q.fill_(125.0)
        steps = torch.arange(float(k.shape[2])).div(512).reshape(1, 1, -1, 1)
        k.copy_((sign * 50.0 + steps).expand_as(k))
    batch.q.fill_(125.0)
    batch.k = torch.cat([k[0].transpose(0, 1) for _, k, _ in batch.sequences])
    got = lab.ragged_prefill(*batch.arguments(), 19, scale=1.0, block_q=16, block_k=16)
    advice = f"All scores are near {sign * 100_000:,}: subtract the maximum seen so far."
    batch.check(PREFILL, got, True, 1.0, advice, FAR)


def test_short_sequences_cost_no_tiles(lab: Any) -> None:
    batch = Batch((48, 1, 0), (48, 16, 16), 1, 1, 16, seed=5)
    got, log = lab.observe(PREFILL, *batch.arguments(), 48, block_q=16, block_k=16)
    batch.check(PREFILL, got)
    check_accesses(PREFILL, log)
    # Three query tiles of the first sequence see 16, 32 and 48 keys, the one of the second 16; nobody sees the rest.
    right = 4 * 16 * (16 + 32 + 48 + 16)
    for name in ("k_ptr", "v_ptr"):
        loaded = log.launches[0].tensor(name).bytes_loaded
        assert loaded == right, (
            f"{PREFILL} loaded {loaded} bytes of {name}, {right} are right: a tile that lies behind its sequence's "
            "last query has nothing to do, and one that lies before sees keys up to its last query's own"
        )


def test_the_ragged_kernel_does_the_work(lab: Any) -> None:
    batch = Batch((5, 3), (9, 3), 2, 1, 16, seed=6)
    got, log = lab.observe(PREFILL, *batch.arguments(), 5, block_q=16, block_k=16)
    batch.check(PREFILL, got)
    library = doing_the_job(log.operators, "attention", "matmul", "softmax")
    assert not library, f"{PREFILL} ran {', '.join(library)} outside of your kernel, which is to do that"
    check_unwritten(PREFILL, *lab.without_launches(PREFILL, *batch.arguments(), 5, block_q=16, block_k=16))


def test_ragged_prefill_refuses_what_does_not_fit(lab: Any) -> None:
    batch = Batch((5, 3), (9, 3), 4, 2, 16, seed=7)
    q, k, v, cu_q, cu_k = batch.arguments()
    batch.check(PREFILL, lab.ragged_prefill(q, k, v, cu_q, cu_k, 5))
    batch.check(TWIN, lab.ragged_prefill_torch(q, k, v, cu_q, cu_k))

    def refused(what: str, *tensors: Tensor) -> None:
        check_refused(what, lambda: lab.ragged_prefill(*tensors, 5))
        check_refused(what, lambda: lab.ragged_prefill_torch(*tensors))

    refused("q with 4 axes", q[None], k, v, cu_q, cu_k)
    refused("3 query heads on 2 kv heads", q[:, :3], k, v, cu_q, cu_k)
    refused("keys in fp16", q, k.half(), v, cu_q, cu_k)
    refused("bounds in fp32", q, k, v, cu_q.float(), cu_k)
    refused("bounds of another number of sequences", q, k, v, cu_q, cu_k[:2])
    refused("bounds that fall", q, k, v, torch.tensor([0, 9, 8]), cu_k)
    refused("bounds that end before the tokens do", q, k, v, torch.tensor([0, 5, 7]), cu_k)
    check_refused("a longest sequence shorter than one is", lambda: lab.ragged_prefill(q, k, v, cu_q, cu_k, 4))
    check_refused("a tile of 8 queries", lambda: lab.ragged_prefill(q, k, v, cu_q, cu_k, 5, block_q=8))
    low = Batch((5, 3), (9, 3), 4, 2, 16, dtype=torch.bfloat16, seed=7)
    check_right_or_refused(lambda: lab.ragged_prefill(*low.arguments(), 5), lambda got: low.check(PREFILL, got))


@pytest.mark.integration
def test_a_packed_batch_equals_your_single_ones(lab: Any) -> None:
    batch = Batch((18, 5), (25, 5), 4, 2, 16, seed=8)
    singles = [lab.flash_attention_forward(q, k, v, causal=True, block_q=16, block_k=16) for q, k, v in batch.sequences]
    packed = tuple(torch.cat([single[index][0].transpose(0, 1) for single in singles]) for index in (0, 1))
    batch.check("your flash_attention_forward, one by one", packed, advice="Task 6.")
    batch.check(PREFILL, lab.ragged_prefill(*batch.arguments(), 18, block_q=16, block_k=16))
