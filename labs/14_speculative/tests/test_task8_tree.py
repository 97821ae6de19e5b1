"""Task 8: the shape of a tree, and the walk down that keeps the target's law."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.numerics import check_equal
from grader.judge.refusal import check_refused
from labkit.drafting import DraftTree

pytestmark = pytest.mark.task(8)

#   text ── 0 ── 2 ── 5
#        │    └─ 3
#        └─ 1 ── 4
PARENTS = (-1, -1, 0, 0, 1, 2)
PATHS = ((0,), (1,), (0, 2), (0, 3), (1, 4), (0, 2, 5))
P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.6, 0.2, 0.1], dtype=torch.float64)


def random_parents(seed: int) -> tuple[int, ...]:
    """Some tree."""
    generator = random.Random(seed)
    return tuple(generator.randint(-1, index - 1) for index in range(generator.randint(1, 12)))


def ancestors(parents: tuple[int, ...], index: int) -> list[int]:
    """A draft and those that lead to it."""
    path = []
    while index >= 0:
        path.append(index)
        index = parents[index]
    return path[::-1]


def uniforms(*rows: tuple[float, float]) -> Tensor:
    """One pair a row of p."""
    return torch.tensor(rows, dtype=torch.float64)


def test_a_draft_sees_itself_and_its_ancestors(lab: Any) -> None:
    for parents in (PARENTS, (), (-1,), (-1, 0, 1, 2), (-1, -1, -1), *(random_parents(seed) for seed in range(20))):
        right = torch.zeros(len(parents), len(parents), dtype=torch.bool)
        for index in range(len(parents)):
            right[index, ancestors(parents, index)] = True
        check_equal(f"ancestor_mask({parents})", lab.ancestor_mask(parents), right, "Row i: draft i and its ancestors.")


def test_siblings_stand_at_the_same_position(lab: Any) -> None:
    for parents in (PARENTS, (-1,), (-1, 0, 1, 2), (-1, -1, -1), *(random_parents(seed) for seed in range(10))):
        for start in (0, 1, 17):
            right = torch.tensor([start - 1 + len(ancestors(parents, index)) for index in range(len(parents))])
            got = lab.tree_positions(parents, start)
            check_equal(f"tree_positions({parents}, {start})", got, right, "One step further in each generation.")


def test_the_walk_ends_where_no_child_is_kept(lab: Any) -> None:
    tree = DraftTree((0, 1, 2, 3, 0, 1), PARENTS)
    one_hot = torch.eye(4, dtype=torch.float64)
    even = torch.full((4,), 0.25, dtype=torch.float64)
    # Row 0 wants 0, the row after draft 0 wants `second`, after draft 2 `third`.
    for second, third, right in (
        (2, 1, ([0, 2, 5], 3)), (2, 3, ([0, 2], 3)), (3, 0, ([0, 3], 3)), (1, 1, ([0], 1)),
    ):  # fmt: skip
        p = torch.stack([one_hot[0], one_hot[second], even, one_hot[third], one_hot[3], even, one_hot[3]])
        got = lab.verify_tree(p, tree, torch.full((7, 2), 0.5, dtype=torch.float64))
        wants = f"the target wants 0, then {second}, then {third}"
        assert (list(got[0]), got[1]) == right, f"{wants}: got {got}, right is {right}"
    p = torch.stack([one_hot[1], *[even] * 6])
    got = lab.verify_tree(p, tree, torch.tensor([[0.9, 0.1]] * 7, dtype=torch.float64))
    assert (list(got[0]), got[1]) == ([1], 1), (
        f"the target wants the second child of the text; after it draft 4 is judged with 0.9 against 0.25 and falls; "
        f"what is left without token 0 gives 1 for a draw of 0.1: got {got}"
    )
    got = lab.verify_tree(P[None], DraftTree((), ()), uniforms((0.0, 0.75)))
    assert (list(got[0]), got[1]) == ([], 2), f"without drafts the target draws from its first row: got {got}"


def test_a_younger_sibling_is_judged_by_what_is_left(lab: Any) -> None:
    # Siblings without choice: 0, then 1. After 0 is rejected the target wants (0, 1/2, 1/3, 1/6).
    tree = DraftTree((0, 1), (-1, -1))
    p = torch.stack([P, P, P])
    for first, second, own, right in (
        (0.39, 0.9, 0.95, ([0], 3)), (0.41, 0.49, 0.1, ([1], 0)),
        (0.41, 0.51, 0.1, ([], 2)), (0.41, 0.51, 0.7, ([], 3)),
    ):  # fmt: skip
        numbers = uniforms((0.5, own), (first, own), (second, own))
        path, token = lab.verify_tree(p, tree, numbers)
        assert (list(path), token) == right, (
            f"drafts 0 and 1 judged with {first} and {second}: the second by 0.3 / 0.6 once the first is gone; drawing "
            f"with {own}: right is {right}, got {(path, token)}"
        )
    # Drawn siblings: the second from what the drafter had left without the first.
    rest = torch.tensor([0.25, 0.0, 0.5, 0.25], dtype=torch.float64)
    tree = DraftTree((1, 2), (-1, -1), torch.stack([Q, rest]))
    # Rejecting 1 leaves (0.3, 0, 0, 0) / 0.3: token 2 has nothing left, and token 0 is certain.
    path, token = lab.verify_tree(p, tree, uniforms((0.5, 0.9), (0.51, 0.0), (0.0, 0.0)))
    assert (list(path), token) == ([], 0), f"the first rejection leaves token 0 and nothing else, got {(path, token)}"


def test_a_chain_is_judged_as_in_task_2(lab: Any) -> None:
    tree = DraftTree((1, 1, 1), (-1, 0, 1), torch.stack([Q] * 3))
    p = torch.stack([P] * 4)
    for kept in range(4):
        judged = [(0.4 if place < kept else 0.6, 0.05 + 0.2 * place) for place in range(3)]
        numbers = uniforms((0.0, 0.05), *((judge, 0.05 + 0.2 * (place + 1)) for place, (judge, _) in enumerate(judged)))
        draw = float(numbers[kept, 1])
        row = P if kept == 3 else torch.tensor([1.0, 0, 0, 0])
        right = (list(range(kept)), int((row.cumsum(0) <= draw).sum()))
        path, token = lab.verify_tree(p, tree, numbers)
        assert (list(path), token) == right, f"a chain of three, {kept} kept: right is {right}, got {(path, token)}"


def test_trees_emit_the_target_s_distribution(lab: Any) -> None:
    # Two siblings, the first drawn from Q, the second from Q without the first; judged for P. Right code fails with
    # probability alpha; judging the second by P itself, or drawing the own token from P, fails below 1e-10.
    alpha, runs = 1e-6, 1500
    generator = torch.Generator().manual_seed(5)
    numbers = torch.rand(runs, 3, 2, generator=generator, dtype=torch.float64)
    after = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    emitted, kept = [], 0
    for run in range(runs):
        first = int(torch.multinomial(Q, 1, generator=generator))
        rest = Q.clone()
        rest[first] = 0
        rest /= rest.sum()
        second = int(torch.multinomial(rest, 1, generator=generator))
        tree = DraftTree((first, second), (-1, -1), torch.stack([Q, rest]))
        path, token = lab.verify_tree(torch.stack([P, after, after]), tree, numbers[run])
        kept += len(path)
        emitted.append(tree.tokens[path[0]] if path else token)
    result = chi_square(torch.tensor(emitted), P)
    assert result.p_value > alpha, (
        f"first tokens of {runs} trees follow {torch.bincount(torch.tensor(emitted), minlength=4) / runs}, the target "
        f"wants {P.tolist()}: p-value {result.p_value:.1e}"
    )
    # One of the two is kept in 0.775 of the runs; in fewer than 0.72 by chance once in five million.
    assert kept > 0.72 * runs, f"two siblings should be kept more often than one draft (0.70), were in {kept} of {runs}"


def test_trees_that_do_not_fit_are_refused(lab: Any) -> None:
    numbers, p = torch.full((3, 2), 0.6, dtype=torch.float64), torch.stack([P] * 3)
    tree = DraftTree((1, 2), (-1, 0))
    path, token = lab.verify_tree(p, tree, numbers)
    # Token 1 is kept with probability 0.3 only: rejected, and (4/7, 0, 2/7, 1/7) gives 2 for 0.6.
    assert (list(path), token) == ([], 2), f"a good call, got {(path, token)}"
    check_refused("a row of p too few", lambda: lab.verify_tree(p[:2], tree, numbers))
    check_refused("numbers for one draft", lambda: lab.verify_tree(p, tree, numbers[:2]))
    check_refused("a uniform of 1", lambda: lab.verify_tree(p, tree, numbers * 2))
    check_refused("a token outside", lambda: lab.verify_tree(p, DraftTree((1, 4), (-1, 0)), numbers))
    check_refused("one row for two drafts", lambda: lab.verify_tree(p, DraftTree((1, 2), (-1, 0), Q[None]), numbers))
    sure = torch.eye(4, dtype=torch.float64)[:2]
    impossible = DraftTree((1, 2), (-1, 0), sure)
    check_refused("a draft that its row can't draw", lambda: lab.verify_tree(p, impossible, numbers))
    check_refused("a start below 0", lambda: lab.tree_positions((-1,), -1))
