"""Task 2: a run of drafts: where it ends, what follows, and that whole rounds are distributed as the target's text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.numerics import check_equal, check_form
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(2)

VOCAB = 4
# Chains over four tokens: row i holds the distribution of the token after token i.
TARGET = torch.tensor(
    [[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.3, 0.0, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64
)
DRAFTER = torch.tensor(
    [[0.1, 0.5, 0.2, 0.2], [0.3, 0.2, 0.3, 0.2], [0.1, 0.3, 0.3, 0.3], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64
)


def one_hot(*tokens: int) -> Tensor:
    """Rows that are sure of one token each."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).double()


def uniforms(*pairs: tuple[float, float]) -> Tensor:
    """`[1, places, 2]`."""
    return torch.tensor([pairs], dtype=torch.float64)


def verify_one(lab: Any, p: Tensor, q: Tensor, drafts: list[int], draws: Tensor) -> tuple[list[int], int]:
    """One run."""
    tokens, kept = lab.verify(p[None], q[None], torch.tensor([drafts], dtype=torch.int64), draws)
    check_form("the tokens of one run", tokens, (1, len(drafts) + 1), torch.int64)
    check_form("the number of kept drafts", kept, (1,), torch.int64)
    return tokens[0].tolist(), int(kept)


def test_a_rejection_ends_the_round(lab: Any) -> None:
    p = torch.tensor([[0.4, 0.2, 0.2, 0.2]] * 4, dtype=torch.float64)
    q = torch.tensor([[0.2, 0.8, 0.0, 0.0]] * 3, dtype=torch.float64)
    # p/q of token 1 is 0.25. The residual is (0.2, 0, 0.2, 0.2) / 0.6: a draw of 0.5 gives 2, of 0.9 gives 3.
    low, high = (0.2, 0.5), (0.3, 0.9)
    advice = "Kept drafts from the front, then the replacement of the first rejected one, then -1."
    for first, second, third, right, kept in (
        (high, low, low, [3, -1, -1, -1], 0),
        (low, high, low, [1, 3, -1, -1], 1),
        (low, low, high, [1, 1, 3, -1], 2),
        (low, high, high, [1, 3, -1, -1], 1),
    ):
        got = verify_one(lab, p, q, [1, 1, 1], uniforms(first, second, third, (0.0, 0.1)))
        assert got == (right, kept), f"drafts [1, 1, 1]: got {got}, right is {(right, kept)}. {advice}"


def test_the_bonus_token_is_drawn_after_the_last_draft(lab: Any) -> None:
    p = torch.cat([one_hot(2, 0), torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)])
    for u, bonus in ((0.05, 0), (0.2, 1), (0.5, 2), (0.7, 3)):
        got = verify_one(lab, p, one_hot(2, 0), [2, 0], uniforms((0.5, 0.99), (0.5, 0.99), (0.99, u)))
        assert got == ([2, 0, bonus], 2), (
            f"both drafts are certain, so they stay; the bonus drawn with {u} from [0.1, 0.2, 0.3, 0.4] is {bonus}, "
            f"got {got}: it comes from the target's row behind the last draft, with that place's second number"
        )


def test_without_drafts_the_target_speaks_alone(lab: Any) -> None:
    p = torch.tensor([[[0.1, 0.2, 0.3, 0.4]], [[0.4, 0.3, 0.2, 0.1]]], dtype=torch.float64)
    draws = torch.tensor([[[0.9, 0.35]], [[0.1, 0.35]]], dtype=torch.float64)
    tokens, kept = lab.verify(p, p[:, :0], torch.zeros(2, 0, dtype=torch.int64), draws)
    check_equal("the tokens without drafts", tokens, torch.tensor([[2], [0]]), "One draw from p a run.")
    check_equal("kept drafts", kept, torch.tensor([0, 0]))


def test_runs_have_their_own_number_of_drafts(lab: Any) -> None:
    nothing = torch.full((VOCAB,), torch.nan, dtype=torch.float64)
    p = torch.stack([one_hot(1, 2, 3), one_hot(3, 0, 0), one_hot(2, 1, 0)])
    q = torch.stack([one_hot(1, 2), one_hot(3, 3), one_hot(0, 0)])
    drafts = torch.tensor([[1, 2], [3, 99], [-7, 99]])
    # What stands behind a run's drafts is nobody's: NaN in the rows, junk in the ids.
    p[1, 2], p[2, 1], p[2, 2], q[1, 1], q[2, 0], q[2, 1] = (nothing,) * 6
    draws = torch.full((3, 3, 2), 0.5, dtype=torch.float64)
    tokens, kept = lab.verify(p, q, drafts, draws, torch.tensor([2, 1, 0]))
    right = torch.tensor([[1, 2, 3], [3, 0, -1], [2, -1, -1]])
    check_equal("three runs with 2, 1 and 0 drafts", tokens, right, "Padding is never kept and never looked at.")
    check_equal("kept drafts", kept, torch.tensor([2, 1, 0]))
    # The bonus uses the numbers of the place where it falls.
    law = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).expand(2, 3, -1)
    numbers = torch.tensor([[[0.0, 0.05], [0.0, 0.2], [0.0, 0.95]]] * 2, dtype=torch.float64)
    sure = torch.stack([one_hot(3, 0)] * 2)
    tokens, _ = lab.verify(torch.cat([sure[:, :1], law[:, 1:]], 1), sure, torch.tensor([[3, 0]] * 2), numbers,
                           torch.tensor([1, 0]))  # fmt: skip
    check_equal("bonus tokens at places 1 and 0", tokens, torch.tensor([[3, 1, -1], [3, -1, -1]]), "Its own place.")
    # A token drafted in the padding would be kept if anybody looked; and a run may also lose its only draft.
    q = torch.stack([one_hot(2, 2)])
    tokens, kept = lab.verify(p[:1], q, torch.tensor([[2, 2]]), draws[:1], torch.tensor([1]))
    check_equal("one rejected draft before padding", tokens, torch.tensor([[1, -1, -1]]), "Replaced, then over.")
    check_equal("kept drafts", kept, torch.tensor([0]))


def test_each_place_has_its_own_random_numbers(lab: Any) -> None:
    p = torch.tensor([[0.4, 0.2, 0.2, 0.2]] * 3, dtype=torch.float64)
    q = torch.tensor([[0.2, 0.8, 0.0, 0.0]] * 2, dtype=torch.float64)
    grid = [0.1, 0.4, 0.8]
    for first in grid:
        for second in grid:
            for own in ((0.1, 0.5, 0.9), (0.5, 0.9, 0.1), (0.9, 0.1, 0.5)):
                kept = 0 if first > 0.25 else 1 if second > 0.25 else 2
                row = p[2] if kept == 2 else torch.tensor([1, 0, 1, 1]).double() / 3
                token = int((row.cumsum(0) <= own[kept]).sum())
                right = ([1] * kept + [token] + [-1] * (2 - kept), kept)
                got = verify_one(lab, p, q, [1, 1], uniforms((first, own[0]), (second, own[1]), (0.0, own[2])))
                assert got == right, (
                    f"uniforms {first}, {second} judge the drafts and {own} draw the target's own token at places 0, "
                    f"1, 2: got {got}, right is {right}"
                )


def test_at_temperature_zero_the_rule_is_a_comparison(lab: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(VOCAB, (50, 4), generator=generator)
    drafts = torch.where(torch.rand(50, 3, generator=generator) < 0.7, target[:, :3], 0)
    p = torch.nn.functional.one_hot(target, VOCAB).double()
    q = torch.nn.functional.one_hot(drafts, VOCAB).double()
    draws = torch.rand(50, 4, 2, generator=generator, dtype=torch.float64)
    tokens, kept = lab.verify(p, q, drafts, draws)
    for run in range(50):
        same = [bool(x) for x in target[run, :3] == drafts[run]]
        count = same.index(False) if False in same else 3
        right = [*target[run, : count + 1].tolist(), *[-1] * (3 - count)]
        assert (tokens[run].tolist(), int(kept[run])) == (right, count), (
            f"a certain target wants {target[run].tolist()}, drafts are {drafts[run].tolist()}: got "
            f"{tokens[run].tolist()}, right is {right}, the target's own choice to the first difference"
        )


def test_rounds_emit_the_target_s_joint_distribution(lab: Any) -> None:
    # Two drafts from one chain, judged by another. The first two tokens of the text are compared with the target's
    # exact joint distribution; where a round emits only one, the target goes on alone. Right code fails with
    # probability alpha; bonus from q, going on behind a rejection, and resampling from p fail below 1e-20.
    alpha, runs = 1e-6, 30_000
    generator = torch.Generator().manual_seed(17)
    last = torch.zeros(runs, dtype=torch.int64)
    drafts, p, q = [], [TARGET[last]], []
    for _ in range(2):
        q.append(DRAFTER[last])
        last = torch.multinomial(q[-1], 1, generator=generator)[:, 0]
        drafts.append(last)
        p.append(TARGET[last])
    draws = torch.rand(runs, 3, 2, generator=generator, dtype=torch.float64)
    tokens, kept = lab.verify(torch.stack(p, 1), torch.stack(q, 1), torch.stack(drafts, 1), draws)
    check_form("the tokens", tokens, (runs, 3), torch.int64)
    emitted = (tokens >= 0).sum(1)
    check_equal("emitted tokens", emitted, kept + 1, "One token more than was kept.")
    for places in (2, 3):
        text = tokens[:, :places].clone()
        for place in range(1, places):
            alone = torch.multinomial(TARGET[text[:, place - 1]], 1, generator=generator)[:, 0]
            text[:, place] = torch.where(text[:, place] < 0, alone, text[:, place])
        joint = TARGET[0]
        index = text[:, 0]
        for place in range(1, places):
            joint = (joint.reshape(-1, VOCAB)[:, :, None] * TARGET).reshape(-1)
            index = index * VOCAB + text[:, place]
        result = chi_square(index, joint)
        assert result.p_value > alpha, (
            f"the first {places} tokens of {runs} rounds don't follow the target: p-value {result.p_value:.1e}"
            + (f"; they hold a text that the target never writes ({result.impossible})" if result.impossible else "")
        )


def test_arguments_that_do_not_fit_are_refused(lab: Any) -> None:
    p, q = TARGET[None, :3], DRAFTER[None, :2]
    drafts, draws = torch.tensor([[1, 2]]), torch.full((1, 3, 2), 0.5, dtype=torch.float64)
    tokens, _ = lab.verify(p, q, drafts, draws)
    # The first draft has the ratio 0.4 and falls to 0.5; the residual is certain of token 0.
    check_equal("a good call", tokens, torch.tensor([[0, -1, -1]]), "A rejection, its replacement, then -1.")
    check_refused("as many rows of p as drafts", lambda: lab.verify(p[:, :2], q, drafts, draws))
    check_refused("another vocabulary", lambda: lab.verify(p, q[:, :, :3], drafts, draws))
    check_refused("one draft too few", lambda: lab.verify(p, q, drafts[:, :1], draws))
    check_refused("one random number a place", lambda: lab.verify(p, q, drafts, draws[..., :1]))
    check_refused("a uniform of 1", lambda: lab.verify(p, q, drafts, draws * 2))
    check_refused("more drafts than there are", lambda: lab.verify(p, q, drafts, draws, torch.tensor([3])))
    check_refused("a negative count", lambda: lab.verify(p, q, drafts, draws, torch.tensor([-1])))
    check_refused("a draft outside", lambda: lab.verify(p, q, drafts + 2, draws))
    check_refused("a draft that q can't have drawn", lambda: lab.verify(p, torch.stack([one_hot(0, 0)]), drafts, draws))
    bad = q.clone()
    bad[0, 1, 0] = torch.nan
    check_refused("NaN in q", lambda: lab.verify(p, bad, drafts, draws))
