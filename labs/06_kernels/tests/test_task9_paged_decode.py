"""Task 9: decode attention through block tables, with poison wherever nobody's tokens lie."""

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

pytestmark = pytest.mark.task(9)

CASES = pairwise(
    {
        "lengths": [(1, 17), (16, 15), (33, 1), (31, 50)],
        "block_size": [1, 5, 16, 32],
        "head_dim": [40, 64, 80, 128],
        "heads": [(2, 2), (4, 2), (6, 2), (4, 1)],
        "block_k": [16, 32],
        "layout": ["contiguous", "heads first"],
        "dtype": [torch.float32, torch.float16],
        "table": [torch.int32, torch.int64],
        "scale": [None, 0.3],
    }
)
assert len(CASES) <= 24

DECODE, TWIN = "paged_decode", "paged_decode_torch"


class Memory:
    """Sequences of known keys and values, scattered over a pool whose every other slot is NaN.

    Args:
        lengths: tokens of each sequence.
        padding: what stands in a block table behind the blocks that are needed; None names a block of NaN.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        block_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        table: torch.dtype = torch.int32,
        padding: int | None = None,
        spare: int = 2,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-length // block_size) for length in lengths]
        width = max(needed) + spare
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=generator).tolist()
        free = order[sum(needed) :]
        self.dtype, self.lengths = dtype, torch.tensor(lengths, dtype=table)
        self.tables = torch.full((len(lengths), width), free[0] if padding is None else padding, dtype=table)
        self.k, self.v = (
            torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan")).to(dtype) for _ in "kv"
        )
        self.sequences = []
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            q, k, v = qkv(1, heads, kv_heads, 1, length, head_dim, dtype=dtype, seed=seed + 10 * row)
            self.sequences.append((q, k, v))
            blocks, order = order[:count], order[count:]
            self.tables[row, :count] = torch.tensor(blocks, dtype=table)
            for token in range(length):
                place = blocks[token // block_size], token % block_size
                self.k[place], self.v[place] = k[0, :, token], v[0, :, token]
        self.q = torch.cat([q for q, _, _ in self.sequences]).squeeze(2)

    def arguments(self) -> tuple[Tensor, ...]:
        """q, key_blocks, value_blocks, block_tables, lengths."""
        return self.q, self.k, self.v, self.tables, self.lengths

    def check(
        self, what: str, got: object, scale: float | None = None, advice: str = "", score_size: float = 1.0
    ) -> None:
        """Each row against float64 over its own keys and values."""
        assert isinstance(got, (tuple, list)) and len(got) == 2, f"{what} must return output and log-sum-exp: {got!r}"
        for row, (q, k, v) in enumerate(self.sequences):
            parts = tuple(part[row : row + 1].unsqueeze(2) if isinstance(part, Tensor) else part for part in got)
            name = f"{what}, row {row} of {int(self.lengths[row])} tokens"
            check_attention(
                name, parts, q, k, v, who_sees_whom(1, k.shape[2]), scale, score_size=score_size, advice=advice
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_twin_matches_float64(lab: Any, block_size: int, dtype: torch.dtype) -> None:
    memory = Memory((17, 1, 32), block_size, 6, 2, 20, dtype=dtype, seed=1)
    memory.check(TWIN, lab.paged_decode_torch(*memory.arguments(), scale=0.3), 0.3)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_paged_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    (heads, kv_heads), dtype = case["heads"], case["dtype"]
    memory = Memory(
        case["lengths"], case["block_size"], heads, kv_heads, case["head_dim"], dtype=dtype, table=case["table"], seed=2
    )  # fmt: skip
    q, k, v, tables, lengths = memory.arguments()
    if case["layout"] == "heads first":
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        tables = torch.cat([tables, tables], dim=1)[:, : tables.shape[1]]
    got = lab.paged_decode(q, k, v, tables, lengths, scale=case["scale"], num_splits=1, block_k=case["block_k"])
    advice = "Free blocks, and slots behind a sequence's last token, hold NaN: neither may reach a product."
    memory.check(DECODE, got, case["scale"], f"{advice} Case: {case}")


def test_ragged_lengths_and_empty_sequences(lab: Any) -> None:
    memory = Memory((0, 40, 1, 0, 16, 15), 8, 4, 2, 16, seed=3)
    advice = "Each row ends at its own length; a sequence of no tokens gives 0 and -inf."
    memory.check(DECODE, lab.paged_decode(*memory.arguments(), num_splits=1, block_k=16), None, advice)
    memory.check(TWIN, lab.paged_decode_torch(*memory.arguments()), None, advice)


def test_sequences_may_share_blocks(lab: Any) -> None:
    memory = Memory((24, 24), 8, 2, 1, 16, seed=4)
    # The second sequence starts with the first one's first two blocks, as after a prefix hit.
    memory.tables[1, :2] = memory.tables[0, :2]
    (_, first_k, first_v), (_, k, v) = memory.sequences
    k[:, :, :16], v[:, :, :16] = first_k[:, :, :16], first_v[:, :, :16]
    memory.check(DECODE, lab.paged_decode(*memory.arguments(), num_splits=1, block_k=16))
    memory.check(TWIN, lab.paged_decode_torch(*memory.arguments()))


@pytest.mark.parametrize("padding", [-1, 2**30])
def test_table_padding_is_never_read(lab: Any, padding: int) -> None:
    memory = Memory((3, 20), 2, 2, 1, 16, padding=padding, spare=20, seed=5)
    got, log = lab.observe(DECODE, *memory.arguments(), num_splits=1, block_k=32)
    advice = f"Behind a sequence's blocks the table holds {padding}, which is no block."
    memory.check(DECODE, got, None, advice)
    memory.check(TWIN, lab.paged_decode_torch(*memory.arguments()), None, advice)
    check_accesses(f"{DECODE} with {padding} behind the blocks of its tables", log)
    loaded, most = log.launches[0].tensor("table_ptr").bytes_loaded, 4 * int(memory.lengths.sum())
    assert loaded <= most, (
        f"{DECODE} loaded {loaded} bytes of the block tables; one entry of 4 bytes a token, {most} in all, is enough, "
        "and what stands behind them is not to be read"
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_paged_scores_far_from_zero_stay_finite(lab: Any, sign: int) -> None:
    memory = Memory((37, 5), 4, 2, 1, 16, seed=6)
    for row, (q, k, _) in enumerate(memory.sequences):
        q.fill_(125.0)
        length = k.shape[2]
        k.copy_((sign * 50.0 + torch.arange(float(length)).div(512)).reshape(1, 1, length, 1).expand_as(k))
        for token in range(length):
            memory.k[int(memory.tables[row, token // 4]), token % 4] = k[0, :, token]
    memory.q.fill_(125.0)
    got = lab.paged_decode(*memory.arguments(), scale=1.0, num_splits=1, block_k=16)
    advice = f"All scores are near {sign * 100_000:,}: subtract the maximum seen so far."
    memory.check(DECODE, got, 1.0, advice, FAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_a_sequence_s_own_tokens_are_read(lab: Any, dtype: torch.dtype) -> None:
    memory = Memory((21, 1, 40), 8, 6, 2, 40, dtype=dtype, seed=7)
    got, log = lab.observe(DECODE, *memory.arguments(), num_splits=1, block_k=16)
    memory.check(DECODE, got)
    check_accesses(DECODE, log)
    for name in ("k_ptr", "v_ptr"):
        loaded, right = log.launches[0].tensor(name).bytes_loaded, 62 * 2 * 40 * dtype.itemsize
        assert loaded == right, (
            f"{DECODE} loaded {loaded} bytes of {name}; the sequences' 62 tokens have {right}, and each is needed once "
            "for all query heads of its group"
        )


def test_the_paged_kernel_does_the_work(lab: Any) -> None:
    memory = Memory((9, 3), 4, 2, 1, 16, seed=8)
    got, log = lab.observe(DECODE, *memory.arguments(), num_splits=1, block_k=16)
    memory.check(DECODE, got)
    library = doing_the_job(log.operators, "attention", "matmul", "softmax")
    assert not library, f"{DECODE} ran {', '.join(library)} outside of your kernel, which is to do that"
    check_unwritten(DECODE, *lab.without_launches(DECODE, *memory.arguments(), num_splits=1, block_k=16))


def test_paged_decode_refuses_what_does_not_fit(lab: Any) -> None:
    memory = Memory((9, 3), 4, 4, 2, 16, seed=9)
    q, k, v, tables, lengths = memory.arguments()
    memory.check(DECODE, lab.paged_decode(q, k, v, tables, lengths, num_splits=1))
    memory.check(TWIN, lab.paged_decode_torch(q, k, v, tables, lengths))
    wrong_tables = tables.clone()
    wrong_tables[1, 0] = len(k)
    negative = tables.clone()
    negative[0, 2] = -1
    for call in (lab.paged_decode, lab.paged_decode_torch):

        def refused(what: str, *tensors: Tensor, call: Any = call) -> None:
            check_refused(what, lambda: call(*tensors))

        refused("q with 4 axes", q.unsqueeze(2), k, v, tables, lengths)
        refused("3 query heads on 2 kv heads", q[:, :3], k, v, tables, lengths)
        refused("keys in fp16", q, k.half(), v, tables, lengths)
        refused("tables of one row for two queries", q, k, v, tables[:1], lengths)
        refused("lengths in fp32", q, k, v, tables, lengths.float())
        refused("a length that the table can't hold", q, k, v, tables, lengths + 20)
        refused("a negative length", q, k, v, tables, lengths - 5)
        refused("a block that isn't there", q, k, v, wrong_tables, lengths)
        refused("a negative block", q, k, v, negative, lengths)
    check_refused("a tile of 8 keys", lambda: lab.paged_decode(q, k, v, tables, lengths, block_k=8))
    check_refused("no split", lambda: lab.paged_decode(q, k, v, tables, lengths, num_splits=0))
    low = Memory((9, 3), 4, 4, 2, 16, dtype=torch.bfloat16, seed=9)
    check_right_or_refused(lambda: lab.paged_decode(*low.arguments(), num_splits=1), lambda got: low.check(DECODE, got))


@pytest.mark.integration
@pytest.mark.parametrize("num_splits", [2, 5, None])
def test_paged_splits_merge_by_your_task_8(lab: Any, num_splits: int | None) -> None:
    memory = Memory((50, 3, 0, 17), 8, 4, 2, 16, seed=10)
    got = lab.paged_decode(*memory.arguments(), num_splits=num_splits, block_k=16)
    advice = "One split passes if the other tests do. Each row is split by its own length; short ones leave some empty."
    memory.check(f"{DECODE} in {num_splits} splits", got, None, advice)
