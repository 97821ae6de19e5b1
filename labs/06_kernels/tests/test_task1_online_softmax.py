"""Task 1: a softmax that sees its row in pieces, against float64 mathematics of the whole row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.covering import pairwise
from grader.judge.numerics import check_close, check_form
from grader.judge.refusal import check_refused
from grader.judge.row_reference import plain_softmax, softmax_rows64

pytestmark = pytest.mark.task(1)

State = tuple[Tensor, Tensor, Tensor]

CASES = pairwise(
    {
        "columns": [1, 7, 8, 9, 25],
        "block_size": [1, 3, 8, 64],
        "rows": [1, 5],
        "dtype": [torch.float32, torch.float16],
        "hidden": ["none", "some", "a block", "a row"],
        "shift": [0.0, -300.0, 300.0],
    }
)
assert len(CASES) <= 24


def scores_of(rows: int, columns: int, hidden: str = "none", seed: int = 0) -> Tensor:
    """Scores of both signs, some of them hidden."""
    scores = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 4
    if hidden == "some":
        scores[:, ::3] = -math.inf
    if hidden == "a block":
        scores[:, : max(1, columns // 2)] = -math.inf
    if hidden == "a row":
        scores[rows // 2] = -math.inf
    return scores


def values_of(columns: int, head_dim: int = 6, seed: int = 1) -> Tensor:
    """Values of both signs, one channel much larger than the others."""
    values = torch.randn(columns, head_dim, generator=torch.Generator().manual_seed(seed))
    values[:, 2] *= 15
    return values


def state64(scores: Tensor, values: Tensor) -> State:
    """The definition, row by row and over visible scores only, so that no infinity is ever subtracted."""
    maximum = torch.full((scores.shape[0],), -math.inf, dtype=torch.float64)
    total = torch.zeros_like(maximum)
    accumulated = torch.zeros(scores.shape[0], values.shape[1], dtype=torch.float64)
    for row, line in enumerate(scores.double()):
        visible = line > -math.inf
        if bool(visible.any()):
            maximum[row] = line[visible].max()
            weights = (line[visible] - maximum[row]).exp()
            total[row] = weights.sum()
            accumulated[row] = (weights.unsqueeze(1) * values.double()[visible]).sum(0)
    return maximum, total, accumulated


def check_state(what: str, got: object, right: State, advice: str) -> None:
    """All three parts of a state, infinities included."""
    assert isinstance(got, (tuple, list)) and len(got) == 3, f"{what} must be a tuple of three tensors, got {got!r}"
    maximum = check_form(f"the maximum of {what}", got[0], tuple(right[0].shape), torch.float32)
    same = torch.equal(maximum.double(), right[0].float().double())
    assert same, f"the maximum of {what} is {maximum.tolist()}, right is {right[0].tolist()}. {advice}"
    # Totals are at most the row's length, accumulated values at most that times the largest value.
    scale = max(1.0, float(right[1].max()))
    check_close(f"the total of {what}", got[1], right[1], scale=scale, dtype=torch.float32, advice=advice)
    scale *= max(1.0, float(right[2].abs().max()))
    check_close(f"accumulated of {what}", got[2], right[2], scale=scale, dtype=torch.float32, advice=advice)


def check_mean(what: str, got: object, scores: Tensor, values: Tensor, advice: str) -> None:
    """The finished mean and log-sum-exp, against the whole row at once."""
    assert isinstance(got, (tuple, list)) and len(got) == 2, f"{what} must be (mean, log_sum_exp), got {got!r}"
    maximum, total, _ = state64(scores, values)
    mean = softmax_rows64(scores) @ values.double()
    scale = float(values.abs().max())
    check_close(f"the mean of {what}", got[0], mean, scale=scale, dtype=torch.float32, advice=advice)
    lse = check_form(f"the log-sum-exp of {what}", got[1], tuple(maximum.shape), torch.float32)
    seen = total > 0
    unseen_right = bool((lse[~seen] == -math.inf).all())
    assert unseen_right, f"{what}: the log-sum-exp of rows with every score hidden must be -inf, got {lse.tolist()}"
    right = (maximum + total.log())[seen]
    scale = max(1.0, float(right.abs().max())) if bool(seen.any()) else 1.0
    check_close(f"the log-sum-exp of {what}", lse[seen], right, scale=scale, dtype=torch.float32, advice=advice)


def check_softmax(what: str, got: object, scores: Tensor, advice: str) -> None:
    """Against float64; the scale is the largest weight."""
    right, plain = softmax_rows64(scores), plain_softmax(scores)
    check_close(what, got, right, scale=float(right.max()), dtype=scores.dtype, plain=plain, advice=advice)


@pytest.mark.parametrize("hidden", ["none", "some", "a row"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 7), (4, 1), (1, 12)])
def test_a_block_s_state_is_its_definition(lab: Any, rows: int, columns: int, hidden: str) -> None:
    scores, values = scores_of(rows, columns, hidden), values_of(columns)
    advice = "m = max s, l = Σ exp(s − m), acc = Σ exp(s − m)·v, each row with a maximum of its own."
    check_state("a block", lab.block_state(scores, values), state64(scores, values), advice)


@pytest.mark.parametrize("pieces", [(5, 6), (1, 10), (10, 1), (3, 1, 4, 3), (1,) * 11])
@pytest.mark.parametrize("hidden", ["none", "some"])
def test_merging_any_split_gives_the_state_of_the_whole(lab: Any, pieces: tuple[int, ...], hidden: str) -> None:
    scores, values = scores_of(4, 11, hidden, seed=3), values_of(11)
    # Rising and falling rows: the new maximum is now on one side, now on the other.
    scores[0] = scores[0].sort().values
    scores[1] = scores[1].sort(descending=True).values
    right = state64(scores, values)
    cuts = list(zip(scores.split(pieces, dim=1), values.split(pieces), strict=True))
    states = [tuple(part.float() for part in state64(*cut)) for cut in cuts]
    advice = "Bring both sides to the larger maximum by exp(m_side − m) before adding; accumulated values too."
    for name, order in (("left to right", states), ("right to left", states[::-1])):
        merged: Any = order[0]
        for state in order[1:]:
            merged = lab.merge_states(merged, state)
        check_state(f"pieces of {pieces} merged {name}", merged, right, advice)


def test_empty_states_change_nothing(lab: Any) -> None:
    scores, values = scores_of(5, 4, seed=4), values_of(4)
    scores[2] = -math.inf
    right = state64(scores, values)
    state = tuple(part.float() for part in right)
    nothing = (torch.full((5,), -math.inf), torch.zeros(5), torch.zeros(5, 6))
    advice = "A state that has seen nothing has the maximum -inf; exp(-inf − (-inf)) is NaN."
    check_state("a state merged with an empty one", lab.merge_states(state, nothing), right, advice)
    check_state("an empty state merged with another", lab.merge_states(nothing, state), right, advice)
    none = lab.merge_states(nothing, nothing)
    check_state("two empty states merged", none, tuple(part.double() for part in nothing), advice)
    empty = lab.block_state(torch.zeros(5, 0), torch.zeros(0, 6))
    check_state("a block of no columns", empty, tuple(part.double() for part in nothing), advice)


@pytest.mark.parametrize("hidden", ["none", "some", "a row"])
def test_finished_states_are_the_softmax_mean(lab: Any, hidden: str) -> None:
    scores, values = scores_of(5, 9, hidden, seed=6) + 3.0, values_of(9)
    state = tuple(part.float() for part in state64(scores, values))
    advice = "mean = acc / l, and 0 where l is 0; log-sum-exp = m + log l."
    check_mean("a finished state", lab.finish_state(state), scores, values, advice)


@pytest.mark.parametrize("pieces", [(11,), (4, 4, 3), (1, 9, 1), (1,) * 11])
@pytest.mark.parametrize("hidden", ["some", "a block", "a row"])
def test_mean_reads_each_block_once(lab: Any, pieces: tuple[int, ...], hidden: str) -> None:
    scores, values = scores_of(4, 11, hidden, seed=7), values_of(11)
    cuts = list(zip(scores.split(pieces, dim=1), values.split(pieces), strict=True))
    reads: list[int] = []

    def read_block(number: int) -> tuple[Tensor, Tensor]:
        reads.append(number)
        return cuts[number]

    got = lab.online_mean(read_block, len(pieces))
    check_mean(f"blocks of {pieces} columns", got, scores, values, "Merge the blocks' states, and divide at the end.")
    once = sorted(reads) == list(range(len(pieces)))
    assert once, f"each of the {len(pieces)} blocks is to be read exactly once, they were read in the order {reads}"


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_softmax_by_blocks_matches_float64(lab: Any, case: dict[str, Any]) -> None:
    scores = scores_of(case["rows"], case["columns"], case["hidden"], seed=8) + case["shift"]
    scores = scores.to(case["dtype"])
    got = lab.online_softmax(scores, case["block_size"])
    check_softmax("online_softmax", got, scores, f"Case: {case}")


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_from_zero_stay_finite(lab: Any, sign: int) -> None:
    # Near ±100,000 and a few units apart, with the largest in the last block; fp32 holds these steps exactly.
    scores = sign * 100_000.0 + torch.arange(10.0).mul(0.5).expand(3, -1) + torch.tensor([[0.0], [2.0], [-4.0]])
    values = values_of(10)
    advice = f"All scores are near {sign * 100_000:,}; a softmax depends on differences only."
    got = lab.online_softmax(scores, 4)
    check_softmax("online_softmax", got, scores, advice)
    mean = lab.online_mean(lambda i: (scores[:, 4 * i : 4 * i + 4], values[4 * i : 4 * i + 4]), 3)
    check_mean("blocks of 4 columns", mean, scores, values, advice)


def test_maxima_may_leap_from_block_to_block(lab: Any) -> None:
    steps = torch.tensor([0.0, 200.0, -200.0, 150.0]).repeat_interleave(3)
    scores = torch.stack([steps, steps.flip(0), -steps]) + torch.arange(12.0).mul(0.1)
    values = values_of(12)
    advice = "The maximum of a block may lie 200 above or below that of the ones before."
    check_softmax("online_softmax", lab.online_softmax(scores, 3), scores, advice)
    mean = lab.online_mean(lambda i: (scores[:, 3 * i : 3 * i + 3], values[3 * i : 3 * i + 3]), 4)
    check_mean("blocks of 3 columns", mean, scores, values, advice)


def test_half_precision_totals_keep_growing(lab: Any) -> None:
    # Above 2,048 an fp16 total no longer notices a weight of 1.
    scores = torch.zeros(2, 3_000, dtype=torch.float16)
    scores[1, ::7] = 1.0
    check_softmax("online_softmax", lab.online_softmax(scores, 1), scores, "Keep the total in fp32 at least.")


def test_hidden_rows_and_blocks_give_zero(lab: Any) -> None:
    scores, values = scores_of(6, 12, seed=9), values_of(12)
    scores[0] = -math.inf
    scores[1, :8] = -math.inf
    scores[2, 4:] = -math.inf
    scores[3, 4:8] = -math.inf
    advice = "A row or a block may hold nothing but -inf: it weighs nothing, at any place and in any order."
    got = lab.online_softmax(scores, 4)
    check_softmax("online_softmax", got, scores, advice)
    mean = lab.online_mean(lambda i: (scores[:, 4 * i : 4 * i + 4], values[4 * i : 4 * i + 4]), 3)
    check_mean("blocks of 4 columns", mean, scores, values, advice)


def test_what_does_not_fit_is_refused(lab: Any) -> None:
    scores, values = scores_of(3, 5), values_of(5)
    right = state64(scores, values)
    state = lab.block_state(scores, values)
    check_state("a block", state, right, "")
    check_refused("5 scores on 4 values", lambda: lab.block_state(scores, values[:4]))
    check_refused("scores with one axis", lambda: lab.block_state(scores[0], values))
    check_refused("fp32 scores, fp16 values", lambda: lab.block_state(scores, values.half()))
    check_refused("states of 3 and 2 rows", lambda: lab.merge_states(state, tuple(part[:2] for part in state)))
    check_refused("a block size of 0", lambda: lab.online_softmax(scores, 0))
    check_refused("scores with three axes", lambda: lab.online_softmax(scores.unsqueeze(0), 2))
    check_refused("no block", lambda: lab.online_mean(lambda i: (scores, values), 0))
