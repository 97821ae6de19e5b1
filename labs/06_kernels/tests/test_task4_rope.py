"""Task 4: RoPE on queries and keys in one kernel, against complex products in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.covering import pairwise
from grader.judge.kernel_checks import check_accesses, check_traffic, check_unwritten
from grader.judge.layouts import laid_out, unwritten
from grader.judge.numerics import check_close, check_form
from grader.judge.refusal import check_refused
from grader.judge.row_reference import rope64

pytestmark = pytest.mark.task(4)

THETA = 5_000.0

CASES = pairwise(
    {
        "head_dim": [2, 40, 64, 80],
        "tokens": [1, 3, 4, 5, 11],
        "block_tokens": [4, None],
        "heads": [(1, 1), (3, 3), (4, 2), (6, 2), (4, 1)],
        "layout": ["contiguous", "tokens first", "joined"],
        "dtype": [torch.float32, torch.float16],
        "batch": [1, 3],
    }
)
assert len(CASES) <= 26


def heads_of(
    batch: int, heads: int, kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and positions; no two sequences stand at the same place, and positions don't run in order."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, n, tokens, head_dim, generator=generator).to(dtype) for n in (heads, kv_heads))
    positions = torch.stack([torch.randperm(60, generator=generator)[:tokens] for _ in range(batch)])
    return q, k, positions


def tables(num_positions: int, head_dim: int, theta: float = THETA) -> tuple[Tensor, Tensor]:
    """Right tables: as RoPE turns (1, 0)."""
    ones = torch.cat([torch.ones(head_dim // 2), torch.zeros(head_dim // 2)]).expand(1, 1, num_positions, -1)
    turned = rope64(ones, torch.arange(num_positions).unsqueeze(0), theta)[0, 0].float()
    return turned[:, : head_dim // 2].contiguous(), turned[:, head_dim // 2 :].contiguous()


def joined(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k as a joined projection leaves them: heads side by side behind each token, then NaN."""
    batch, heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    room = torch.cat([q, k, unwritten(k.shape, k.dtype)], dim=1).transpose(1, 2).contiguous()
    room = room.reshape(batch, tokens, (heads + 2 * kv_heads) * head_dim)
    split = room.unflatten(2, (heads + 2 * kv_heads, head_dim)).transpose(1, 2)
    return split[:, :heads], split[:, heads : heads + kv_heads]


def check_rope(what: str, got: Any, q: Tensor, k: Tensor, positions: Tensor, advice: str) -> None:
    """Both results against float64; turning keeps sizes, so the scale is the largest pair."""
    assert isinstance(got, (tuple, list)) and len(got) == 2, f"{what} must return (q, k), got {got!r}"
    for name, x, turned in (("q", q, got[0]), ("k", k, got[1])):
        right = rope64(x, positions, THETA)
        scale = 1.5 * float(x.abs().max())
        inputs = (x,)
        check_close(f"{name} of {what}", turned, right, scale=scale, dtype=x.dtype, inputs=inputs, advice=advice)


@pytest.mark.parametrize(("num_positions", "head_dim", "theta"), [(7, 8, 10_000.0), (1, 2, 500.0), (40, 6, 500_000.0)])
def test_tables_hold_every_angle(lab: Any, num_positions: int, head_dim: int, theta: float) -> None:
    cos, sin = lab.rope_tables(num_positions, head_dim, theta)
    right = tables(num_positions, head_dim, theta)
    advice = "Pair i turns by position · theta^(−2i / head_dim); row p of the tables is position p, from 0 on."
    check_close("cos", cos, right[0].double(), scale=1.0, dtype=torch.float32, advice=advice)
    check_close("sin", sin, right[1].double(), scale=1.0, dtype=torch.float32, advice=advice)


def test_tables_are_exact_at_far_positions(lab: Any) -> None:
    cos, sin = lab.rope_tables(99_992, 6, THETA)
    ones = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 6)
    right = rope64(ones, torch.tensor([[99_991]]), THETA)[0, 0]
    advice = "fp32 angles of thousands of radians are off by thousandths: multiply position and frequency in float64."
    check_form("cos", cos, (99_992, 3), torch.float32)
    check_form("sin", sin, (99_992, 3), torch.float32)
    check_close("cos at 99,991", cos[-1:], right[:, :3], scale=1.0, dtype=torch.float32, advice=advice)
    check_close("sin at 99,991", sin[-1:], right[:, 3:], scale=1.0, dtype=torch.float32, advice=advice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rope_twin_matches_float64(lab: Any, dtype: torch.dtype) -> None:
    q, k, positions = heads_of(2, 6, 3, 5, 8, dtype, seed=1)
    advice = "Channel i pairs with channel i + head_dim / 2, and every head of a token turns by the same angles."
    got = lab.apply_rope_torch(q, k, *tables(60, 8), positions)
    check_rope("apply_rope_torch", got, q, k, positions, advice)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_rope_kernel_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    heads, kv_heads = case["heads"]
    q, k, positions = heads_of(
        case["batch"], heads, kv_heads, case["tokens"], case["head_dim"], case["dtype"], seed=2
    )  # fmt: skip
    given, out = (q, k), (unwritten(q.shape, q.dtype), unwritten(k.shape, k.dtype))
    if case["layout"] == "tokens first":
        given, out = (tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in pair) for pair in (given, out))
    if case["layout"] == "joined":
        given, out = joined(q, k), joined(*out)
    cos, sin = tables(60, case["head_dim"])
    got = lab.apply_rope(*given, cos, sin, positions, block_tokens=case["block_tokens"], out=out)
    check_rope("apply_rope", got, q, k, positions, f"Case: {case}")
    check_rope("out after apply_rope", out, q, k, positions, f"Case: {case}")
    assert torch.equal(given[0], q) and torch.equal(given[1], k), "apply_rope changed q or k, although `out` is given"


def test_positions_are_those_given(lab: Any) -> None:
    q, k, _ = heads_of(3, 4, 2, 5, 8, seed=3)
    cos, sin = tables(60, 8)
    # A decode batch: each sequence goes on where it stands. Then int32, and positions laid out by columns.
    positions = torch.tensor([[0, 1, 2, 3, 4], [50, 51, 52, 53, 54], [7, 7, 30, 2, 59]])
    advice = "Position of token t in row b is positions[b, t]: not t, and not the row's neighbour's."
    for name, given in (
        ("int64", positions),
        ("int32", positions.int()),
        ("columns first", laid_out(positions, "columns first")),
    ):
        got = lab.apply_rope(q, k, cos, sin, given, block_tokens=2)
        check_rope(f"apply_rope with {name} positions", got, q, k, positions, advice)
    cos, sin = laid_out(cos, "columns first"), laid_out(sin, "every other")
    got = lab.apply_rope(q, k, cos, sin, positions)
    check_rope("apply_rope with strided tables", got, q, k, positions, "Tables have strides of their own.")


def test_rope_scores_depend_on_distances_only(lab: Any) -> None:
    q, k, _ = heads_of(1, 4, 2, 1, 40, seed=4)
    cos, sin = tables(60, 40)
    scores = []
    for offset in (0, 9, 41):
        positions = torch.tensor([[offset + 5]]), torch.tensor([[offset]])
        turned = [lab.apply_rope(q, k, cos, sin, at) for at in positions]
        check_rope("apply_rope", turned[0], q, k, positions[0], "")
        scores.append((turned[0][0][0, :2, 0].double() * turned[1][1][0, :, 0].double()).sum(-1))
    for score in scores[1:]:
        advice = "Query and key 5 tokens apart must score the same wherever they stand."
        check_close("the score", score.float(), scores[0], scale=40.0, dtype=torch.float32, advice=advice)


def test_rope_may_overwrite_its_inputs(lab: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        q, k, positions = heads_of(2, 4, 2, 5, 8, dtype, seed=5)
        in_place = q.clone(), k.clone()
        advice = "The second half needs the first as it was: load both before you store either."
        check_rope("apply_rope", lab.apply_rope(q, k, *tables(60, 8), positions), q, k, positions, advice)
        got = lab.apply_rope(*in_place, *tables(60, 8), positions, block_tokens=2, out=in_place)
        check_rope("apply_rope in place", got, q, k, positions, advice)
        check_rope("q and k after it", in_place, q, k, positions, advice)


def test_rope_moves_each_head_once_in_one_launch(lab: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        q, k, positions = heads_of(2, 6, 2, 5, 8, dtype, seed=6)
        got, log = lab.observe("apply_rope", q, k, *tables(60, 8), positions, block_tokens=4)
        check_rope("apply_rope", got, q, k, positions, "")
        heads = (q.numel() + k.numel()) * dtype.itemsize
        # For each token of each row a position of 8 bytes, 4 cosines and 4 sines.
        extra = 2 * 5 * (8 + 2 * 4 * 4)
        advice = "One kernel turns q and k. Load positions, cosines and sines once a token, and use them for all heads."
        check_traffic("apply_rope", log, launches=1, loaded=heads + extra, stored=heads, advice=advice)


def test_rope_accesses_stay_inside(lab: Any) -> None:
    for tokens, head_dim, block_tokens in ((5, 6, 4), (1, 40, 2)):
        q, k, positions = heads_of(2, 3, 1, tokens, head_dim, seed=7)
        got, log = lab.observe("apply_rope", q, k, *tables(60, head_dim), positions, block_tokens=block_tokens)
        check_rope("apply_rope", got, q, k, positions, "")
        check_accesses(f"apply_rope of {tokens} tokens in tiles of {block_tokens}, head dim {head_dim}", log)


def test_the_rope_kernel_does_the_work(lab: Any) -> None:
    q, k, positions = heads_of(1, 3, 1, 4, 6, seed=8)
    cos, sin = tables(60, 6)
    check_rope("apply_rope", lab.apply_rope(q, k, cos, sin, positions), q, k, positions, "")
    out = unwritten(q.shape, q.dtype), unwritten(k.shape, k.dtype)
    lab.without_launches("apply_rope", q, k, cos, sin, positions, out=out)
    check_unwritten("apply_rope", *out)


def test_rope_refuses_what_does_not_fit(lab: Any) -> None:
    q, k, positions = heads_of(2, 4, 2, 3, 8, seed=9)
    cos, sin = tables(60, 8)
    check_rope("apply_rope", lab.apply_rope(q, k, cos, sin, positions), q, k, positions, "")
    check_rope("apply_rope_torch", lab.apply_rope_torch(q, k, cos, sin, positions), q, k, positions, "")
    right = tables(9, 8, 10_000.0)[0].double()
    check_close("cos", lab.rope_tables(9, 8)[0], right, scale=1.0, dtype=torch.float32)
    check_refused("an odd head_dim", lambda: lab.apply_rope(q[..., :7], k[..., :7], cos, sin, positions))
    check_refused("keys of 2 tokens", lambda: lab.apply_rope(q, k[:, :, :2], cos, sin, positions))
    check_refused("tables of another head_dim", lambda: lab.apply_rope(q, k, cos[:, :3], sin[:, :3], positions))
    check_refused("tables in fp16", lambda: lab.apply_rope(q, k, cos.half(), sin.half(), positions))
    check_refused("positions of one row", lambda: lab.apply_rope(q, k, cos, sin, positions[:1]))
    check_refused("position 60 of 60", lambda: lab.apply_rope(q, k, cos, sin, torch.full((2, 3), 60)), mentions="60")
    check_refused("position -1", lambda: lab.apply_rope(q, k, cos, sin, torch.full((2, 3), -1)), mentions="-1")
    check_refused("tables for a head_dim of 7", lambda: lab.rope_tables(9, 7))


@pytest.mark.integration
def test_your_kernel_turns_by_your_tables(lab: Any) -> None:
    q, k, positions = heads_of(2, 4, 2, 5, 40, seed=10)
    cos, sin = lab.rope_tables(60, 40, THETA)
    got = lab.apply_rope(q, k, cos, sin, positions)
    check_rope("apply_rope on rope_tables", got, q, k, positions, "Both are yours.")
