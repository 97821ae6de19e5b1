"""Task 17: what passes for typical, which path stays, and that this is another law than the target's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from grader.judge.refusal import check_refused
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.drafting import DraftTree
from labkit.sampling_params import SamplingParams
from labkit.scripted_drafter import ScriptedTreeDrafter
from labkit.specs import TinyLlama

pytestmark = pytest.mark.task(17)

ROWS = (
    (1.0, 0.0, 0.0, 0.0),
    (0.25, 0.25, 0.25, 0.25),
    (0.9, 0.05, 0.03, 0.02),
    (0.6, 0.2, 0.15, 0.05),
    (0.5, 0.5, 0.0, 0.0),
)


def least(row: Any, epsilon: float = 0.09, delta: float = 0.3) -> float:
    """The rule, number by number."""
    return min(epsilon, delta * math.exp(sum(value * math.log(value) for value in row if value > 0)))


def test_the_threshold_falls_where_the_target_is_unsure(lab: Any) -> None:
    p = torch.tensor([ROWS[:2], ROWS[2:4]], dtype=torch.float64)
    for epsilon, delta in ((0.09, 0.3), (0.9, 0.5), (0.2, 0.1), (0.01, 0.9)):
        right = torch.tensor([[least(row, epsilon, delta) for row in pair] for pair in p.tolist()], dtype=torch.float64)
        check_close(
            f"thresholds with epsilon {epsilon}, delta {delta}", lab.typical_threshold(p, epsilon, delta), right,
            scale=1.0, dtype=torch.float64, advice="min(epsilon, delta * exp(-entropy)), in nats; 0 log 0 is 0.",
        )  # fmt: skip
    right = torch.tensor([least(row) for row in ROWS], dtype=torch.float64)
    got = lab.typical_threshold(torch.tensor(ROWS, dtype=torch.float64))
    check_close("thresholds with the numbers of Medusa's code", got, right, scale=1.0, dtype=torch.float64)


def inverse(row: Any, u: float) -> int:
    """The token that a uniform stands for."""
    return int((torch.tensor(row, dtype=torch.float64).cumsum(0) <= u).sum())


def verify(lab: Any, rows: list[Any], tokens: tuple[int, ...], parents: tuple[int, ...], **limits: float) -> Any:
    """A verification whose own token is drawn with 0.5."""
    p = torch.tensor(rows, dtype=torch.float64)
    numbers = torch.full((len(rows), 2), 0.5, dtype=torch.float64)
    path, token = lab.verify_typical(p, DraftTree(tokens, parents), numbers, **limits)
    return list(path), token


def test_a_draft_is_kept_above_the_threshold(lab: Any) -> None:
    for row in ROWS:
        for token in range(4):
            for epsilon, delta in ((0.09, 0.3), (0.3, 0.9), (0.04, 0.3), (0.2, 0.15)):
                path, own = verify(lab, [row, ROWS[1]], (token,), (-1,), epsilon=epsilon, delta=delta)
                right = row[token] > least(row, epsilon, delta)
                assert (path == [0]) == right and own == inverse(ROWS[1] if right else row, 0.5), (
                    f"draft {token} of {row} with epsilon {epsilon}, delta {delta}: the threshold is "
                    f"{least(row, epsilon, delta):.3f}, so it is {'kept' if right else 'rejected'}; kept are {path}, "
                    f"and {own} follows, drawn with 0.5 from the row behind the path"
                )
    row = (0.5, 0.25, 0.25, 0.0)
    assert verify(lab, [row, row], (1,), (-1,), epsilon=0.25, delta=0.99)[0] == [], "as much as epsilon is not above it"


def test_the_longest_typical_path_stays(lab: Any) -> None:
    flat, sure = ROWS[1], ROWS[0]
    for rows, tokens, parents, right, why in (
        ([flat] * 4, (0, 1, 2), (-1, 0, 1), [0, 1, 2], "a chain of typical drafts stays as a whole"),
        ([flat, sure, flat, flat], (0, 1, 2), (-1, 0, 1), [0], "behind a draft that isn't typical nothing stays"),
        ([flat] * 5, (0, 1, 2, 3), (-1, -1, 1, -1), [1, 2], "the longest path stays, not the first"),
        ([flat] * 5, (0, 1, 2, 3), (-1, -1, 0, 1), [0, 2], "of equally long paths the one whose end comes first stays"),
        ([flat] * 5, (0, 1, 2, 3), (-1, -1, 1, 0), [1, 2], "of equally long paths the one whose end comes first stays"),
        ([flat, flat, sure, flat, flat], (0, 1, 2, 3), (-1, -1, 1, 0), [0, 3], "each draft is judged by its parent's"),
        ([sure, flat, flat], (1, 2), (-1, 0), [], "nothing is typical but token 0"),
        ([sure, flat, sure], (1, 0), (-1, -1), [1], "the elder sibling's rejection doesn't touch the younger"),
    ):  # fmt: skip
        path, _ = verify(lab, rows, tokens, parents)
        assert path == right, f"drafts {tokens} with parents {parents}: {right} stay, since {why}; got {path}"
    for rows, delta, right in (([sure, flat, flat], 0.9, [0, 1]), ([flat, ROWS[3], flat], 0.5, [0])):
        path, _ = verify(lab, rows, (0, 2), (-1, 0), epsilon=0.4, delta=delta)
        assert path == right, f"rows {rows}: every row has a threshold of its own, so {right} stay; got {path}"


def test_the_own_token_follows_the_path(lab: Any) -> None:
    rows = [ROWS[1], (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), ROWS[0]]
    for tokens, parents, right in (((0, 3, 3), (-1, 0, 0), ([0], 1)), ((3, 2, 1), (-1, -1, 0), ([0, 2], 0)),
                                   ((3, 2, 1), (-1, -1, 1), ([0], 1))):  # fmt: skip
        got = verify(lab, rows, tokens, parents)
        assert got == (right[0], right[1]), f"drafts {tokens}, parents {parents}: {right}, got {got}"
    p = torch.tensor([ROWS[3], ROWS[3]], dtype=torch.float64)
    for u, token in ((0.1, 0), (0.7, 1), (0.9, 2), (0.97, 3)):
        numbers = torch.tensor([[0.3, 0.3], [0.3, u]], dtype=torch.float64)
        got = lab.verify_typical(p, DraftTree((0,), (-1,)), numbers)
        assert got[1] == token, f"behind draft 0 its row is drawn from with uniforms[1, 1] = {u}: {token}, got {got}"
        got = lab.verify_typical(p[:1], DraftTree((), ()), numbers[1:])
        assert (list(got[0]), got[1]) == ([], token), f"without drafts uniforms[0, 1] draws the own token: {got}"


def test_it_is_another_law_than_the_target_s(lab: Any) -> None:
    row = ROWS[3]
    p = torch.tensor([row, row], dtype=torch.float64)
    kept = 0
    for i in range(50):
        numbers = torch.full((2, 2), (i + 0.5) / 50, dtype=torch.float64)
        path, own = lab.verify_typical(p, DraftTree((2,), (-1,)), numbers)
        assert own == inverse(row, (i + 0.5) / 50), f"the own token is drawn as ever: {own} with {(i + 0.5) / 50}"
        kept += list(path) == [0]
    assert kept == 50, (
        f"a typical draft is kept whatever the random numbers are; this one, to which the target gives 0.15, was kept "
        f"in {kept} of 50 cases. That is the price: not lossless."
    )


def test_what_fits_no_tree_is_refused(lab: Any) -> None:
    p, tree = torch.tensor(ROWS[1:4], dtype=torch.float64), DraftTree((1, 2), (-1, 0))
    numbers = torch.full((3, 2), 0.93, dtype=torch.float64)
    path, own = lab.verify_typical(p, tree, numbers)
    assert (list(path), own) == ([0], 1), f"a good call: 0.03 isn't typical of a sure target, 1 follows: {path}, {own}"
    check_refused("a row of p too few", lambda: lab.verify_typical(p[:2], tree, numbers))
    check_refused("numbers for one draft", lambda: lab.verify_typical(p, tree, numbers[:2]))
    check_refused("a uniform of 1", lambda: lab.verify_typical(p, tree, numbers * 2))
    check_refused("a token outside", lambda: lab.verify_typical(p, DraftTree((1, 4), (-1, 0)), numbers))
    check_refused("NaN", lambda: lab.verify_typical(p * torch.nan, tree, numbers))
    for epsilon, delta in ((0.0, 0.3), (1.0, 0.3), (0.09, 0.0), (0.09, 1.0), (math.nan, 0.3), (0.09, math.nan)):
        check_refused(f"epsilon {epsilon}, delta {delta}", lambda e=epsilon, d=delta: lab.typical_threshold(p, e, d))
        check_refused(
            f"epsilon {epsilon}, delta {delta}", lambda e=epsilon, d=delta: lab.verify_typical(p, tree, numbers, e, d)
        )


@pytest.mark.integration
def test_only_greedy_text_stays_the_target_s(lab: Any) -> None:
    config, prompt = ModelConfig.tiny(num_layers=2), [7, 0, 60, 31]
    decoder = Decoder(config, random_weights(config, 1))

    def logits(text: list[int]) -> Tensor:
        return decoder(torch.tensor([text]), torch.arange(len(text)), full_attention)[0, -1]

    plain = list(prompt)
    while len(plain) < 16:
        plain.append(int(logits(plain).argmax()))

    def propose(text: list[int], most: int, draws: list[float]) -> DraftTree:
        # Two of the likeliest tokens, and below the second what is likeliest then.
        first, second = logits(text).topk(2).indices.tolist()
        return DraftTree((second, first, int(logits([*text, first]).argmax())), (-1, -1, 1))

    drafter = ScriptedTreeDrafter(propose)
    got = lab.speculate_tree(
        lab.TreeModel(TinyLlama(config, 1), 60), drafter, prompt, 12, judge=lab.verify_typical
    )  # fmt: skip
    assert list(got.tokens) == plain[4:], f"at temperature 0 only the likeliest is typical: {plain[4:]}, got {got}"
    sampled = [
        lab.speculate_tree(lab.TreeModel(TinyLlama(config, 1), 60), drafter, prompt, 12,
                           SamplingParams(temperature=0.7, seed=1), judge=judge).acceptance_rate
        for judge in (lab.verify_typical, lab.verify_tree)
    ]  # fmt: skip
    assert sampled[0] > 0.3, f"of likely drafts more than a third is typical, kept were {sampled[0]:.2f}"
