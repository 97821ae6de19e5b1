"""Batched speculation: every request gets the text that it gets alone, runs and trees, by one pass a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import solutions.speculative.loop as loop
from grader.judge.distributions import chi_square
from labkit.drafting import Draft, DraftTree, Speculation
from labkit.sampling_params import SamplingParams
from labkit.specs import Markov
from solutions.speculative.adaptive import AdaptiveDrafter
from solutions.speculative.batch_requests import RunRequest, TreeRequest
from solutions.speculative.batched import speculate_batch
from solutions.speculative.loop import speculate
from solutions.speculative.model_drafter import ModelDrafter
from solutions.speculative.ngram import NgramDrafter
from solutions.speculative.tree_loop import speculate_tree
from solutions.speculative.tree_model import TreeModel
from tests.solutions.markov_trees import MarkovBatch, MarkovText, Siblings

P = ((0.5, 0.2, 0.2, 0.1), (0.1, 0.6, 0.1, 0.2), (0.3, 0.0, 0.3, 0.4), (0.25, 0.25, 0.25, 0.25))
Q = ((0.1, 0.5, 0.2, 0.2), (0.3, 0.2, 0.3, 0.2), (0.1, 0.3, 0.3, 0.3), (0.7, 0.1, 0.1, 0.1))


class Outsider:
    """Drafts tokens that the target doesn't have, from a vocabulary of seven."""

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Every third token is unknown."""
        drafts = tuple((len(tokens) + i) % 3 + (4 if (len(tokens) + i) % 3 == 2 else 0) for i in range(max_drafts))
        return Draft(drafts, torch.full((max_drafts, 7), 1 / 7))


@dataclass(frozen=True)
class Tree:
    """What looks like a tree, but nobody has checked it."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs: Tensor | None = None


@dataclass(frozen=True)
class Always:
    """Hands over the same tree every time, whatever it was asked for."""

    tree: Any

    def propose_tree(self, tokens: Sequence[int], max_depth: int, uniforms: Sequence[float]) -> Any:
        """The tree."""
        return self.tree


NAN = torch.full((3, 4), torch.nan)
WRONG_TREES = {
    "nothing": Tree((), ()),
    "wrong": Tree((2, 2, 2), (-1, 0, 1)),
    "ids outside": Tree((9, 1, 4, 2), (-1, 0, -1, 2)),
    "a negative id": Tree((-1, 1), (-1, 0)),
    "NaN": Tree((0, 1, 2), (-1, 0, -1), NAN),
    "a wider vocabulary": Tree((5, 1, 3), (-1, -1, 1), torch.full((3, 7), 1 / 7)),
    "a narrower vocabulary": Tree((0, 1), (-1, 0), torch.full((2, 2), 1 / 2)),
    "parents that come later": Tree((1, 3, 0), (1, -1, 5)),
    "parents below the text": Tree((1, 3, 0), (-2, -1, -1)),
    "parents missing": Tree((1, 3, 0), (-1,)),
    "more than there is room for": Tree((0, 1, 2, 3) * 100, (-1,) * 400),
    "a line far too long": Tree((1, 3) * 40, tuple(range(-1, 79))),
}
KINDS: list[Callable[[], Any]] = [
    lambda: ModelDrafter(Markov(Q, 200).build(), SamplingParams()),
    lambda: NgramDrafter(3, 1),
    Outsider,
    lambda: Siblings(Q),
    lambda: Always(WRONG_TREES["ids outside"]),
    lambda: Always(DraftTree((1, 3, 0, 1), (-1, -1, 0, 1))),
]
RUNS = 3
"""So many of them draft runs; the others trees."""


def drafter(kind: int) -> Any:
    """One of several kinds, fresh."""
    return KINDS[kind]()


def allowed(text: list[int]) -> Tensor:
    """No token twice in a row."""
    return torch.arange(4) != text[-1]


def mixed_requests() -> list[RunRequest | TreeRequest]:
    """Settings, seeds, drafters, lengths and arrivals of all sorts; runs and trees by turns."""
    requests: list[RunRequest | TreeRequest] = []
    for i in range(42):
        kind = i % len(KINDS)
        common: dict[str, Any] = dict(
            prompt=tuple((i + j) % 4 for j in range(1 + i % 5)),
            max_new_tokens=1 + (7 * i) % 23,
            drafter=drafter(kind),
            params=SamplingParams(temperature=(0.0, 1.0, 0.6)[i // 2 % 3], top_k=(0, 3)[i // 3 % 2], seed=i),
            stop_tokens=((), (3,))[i % 4 == 1],
            finished=(lambda tokens: len(tokens) == 9) if i % 5 == 2 else None,
            allowed=allowed if i % 7 in (3, 4) else None,
            arrival=(3 * i) % 11 if i < 36 else 100 + i,
        )
        requests.append(RunRequest(**common, num_drafts=i % 5) if kind < RUNS else TreeRequest(**common))
    return requests


def alone(request: RunRequest | TreeRequest, kind: int, capacity: int = 200) -> Speculation:
    """The request's text without any company."""
    common: dict[str, Any] = dict(
        drafter=drafter(kind), prompt=request.prompt, max_new_tokens=request.max_new_tokens, params=request.params,
        stop_tokens=request.stop_tokens, finished=request.finished, allowed=request.allowed,
    )  # fmt: skip
    if isinstance(request, RunRequest):
        return speculate(Markov(P, capacity).build(), **common, num_drafts=request.num_drafts)
    return speculate_tree(cast(TreeModel, MarkovText(P, capacity)), **common, judge=request.judge)


@pytest.fixture(scope="module")
def texts_alone() -> list[Speculation]:
    """What each of the mixed requests gets alone."""
    return [alone(request, index % len(KINDS)) for index, request in enumerate(mixed_requests())]


@pytest.mark.parametrize("places", [1, 5, 42])
def test_each_request_gets_the_text_and_the_rounds_that_it_gets_alone(
    places: int, texts_alone: list[Speculation]
) -> None:
    requests, target = mixed_requests(), MarkovBatch(P, 200)
    results = speculate_batch(requests, target, places)
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        assert result == texts_alone[index], f"request {index}"
        assert target.texts[index].length == len(request.prompt) + len(result.tokens) - 1
        assert sum(index in ids for ids in target.calls) == len(result.rounds)
        if isinstance(request, RunRequest):
            assert target.longest[index] <= len(request.prompt) + request.max_new_tokens - 1
    assert max(len(ids) for ids in target.calls) <= places
    assert any(round_.accepted for i in range(3, 42, 6) for round_ in results[i].rounds), "no tree was of any use"


@pytest.mark.parametrize("what", WRONG_TREES)
def test_a_wrong_tree_costs_speed_only_and_nobody_else_s(what: str) -> None:
    """Among others that draft well; the target has room for seven drafts behind the longest text."""
    seeds, capacity = range(6), 20
    requests: list[RunRequest | TreeRequest] = [
        TreeRequest((0, 1, 2), 11, Always(WRONG_TREES[what]), allowed=allowed if seed % 2 else None)
        if seed < 4
        else RunRequest((0, 1, 2), 11, NgramDrafter(), SamplingParams(seed=seed))
        for seed in seeds
    ]
    target = MarkovBatch(P, capacity)
    results = speculate_batch(requests, target, 6)
    for index, request in enumerate(requests[:4]):
        plain = speculate(Markov(P, capacity).build(), Outsider(), request.prompt, 11, num_drafts=0,
                          allowed=request.allowed)  # fmt: skip
        assert results[index].tokens == plain.tokens
        assert target.texts[index].length == 13 and target.longest[index] <= capacity
    for request, result in zip(requests[4:], results[4:], strict=True):
        assert result == speculate(Markov(P, capacity).build(), NgramDrafter(), (0, 1, 2), 11, request.params)


def test_trees_are_cut_to_the_room_that_they_have_alone() -> None:
    tree = DraftTree(tuple(i % 4 for i in range(30)), (-1, *(i // 3 for i in range(29))))
    for capacity in (12, 14, 17, 40):
        requests = [TreeRequest((i % 4, 1), 11, Always(tree), SamplingParams(seed=i)) for i in range(8)]
        target = MarkovBatch(P, capacity)
        results = speculate_batch(requests, target, 3)
        for request, result in zip(requests, results, strict=True):
            right = speculate_tree(
                cast(TreeModel, MarkovText(P, capacity)), request.drafter, request.prompt, 11, request.params
            )
            assert result == right, f"capacity {capacity}"
        assert max(target.longest.values()) <= capacity


def test_a_request_may_be_judged_by_another_rule() -> None:
    judged = []

    def keep_all(p: Tensor, tree: DraftTree, uniforms: Tensor) -> tuple[list[int], int]:
        judged.append(len(tree.tokens))
        return list(range(len(tree.tokens))), 0

    chain = Always(DraftTree((1, 1), (-1, 0)))
    results = speculate_batch(
        [TreeRequest((0,), 6, chain, judge=keep_all), TreeRequest((0,), 6, chain)], MarkovBatch(P, 200), 2
    )
    assert results[0].tokens == (1, 1, 0, 1, 1, 0) and judged == [2, 2]
    assert results[1] == speculate_tree(cast(TreeModel, MarkovText(P, 200)), chain, (0,), 6)


def test_a_step_is_one_pass_and_one_verification_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []
    original = loop.verify

    def counting(*args: Tensor) -> tuple[Tensor, Tensor]:
        verified.append(len(args[0]))
        return original(*args)

    monkeypatch.setattr(loop, "verify", counting)
    requests, target = mixed_requests(), MarkovBatch(P, 200)
    results = speculate_batch(requests, target, 6)
    runs = [sum(isinstance(requests[index], RunRequest) for index in ids) for ids in target.calls]
    assert verified == [count for count in runs if count]
    assert max(len(ids) for ids in target.calls) == 6
    assert sum(map(len, target.calls)) == sum(len(result.rounds) for result in results)


def test_a_place_is_given_on_as_soon_as_it_is_free() -> None:
    requests = [replace(request, arrival=0) for request in mixed_requests()]
    target = MarkovBatch(P, 200)
    results = speculate_batch(requests, target, 4)
    joined = [index for ids in target.calls for index in ids]
    assert list(dict.fromkeys(joined)) == list(range(42))
    left = [len(result.rounds) for result in results]
    for ids in target.calls:
        for index in ids:
            left[index] -= 1
        # Fewer than four run only when nobody waits any more.
        assert len(ids) == 4 or 41 in ids or left[41] == 0
    assert not any(left)


def test_first_tokens_of_a_batch_follow_the_target() -> None:
    # 400 requests in one batch, half of them with trees; right code fails with probability 1e-6 for each of two tokens.
    requests = [
        RunRequest((0,), 3, drafter(0), SamplingParams(seed=1000 + i), num_drafts=1 + i % 2)
        if i % 2
        else TreeRequest((0,), 3, Siblings(Q), SamplingParams(seed=1000 + i))
        for i in range(400)
    ]
    target = MarkovBatch(P, 200)
    results = speculate_batch(requests, target, 400)
    p = torch.tensor(P, dtype=torch.float64)
    law = p[0]
    for place in range(2):
        got = chi_square(torch.tensor([result.tokens[place] for result in results]), law)
        assert got.p_value > 1e-6, f"token {place}: p-value {got.p_value:.1e}"
        law = law @ p


def test_the_number_of_drafts_may_follow_the_load() -> None:
    target, drafted = MarkovBatch(P, 200), list[tuple[int, int]]()

    class Repeating:
        def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
            drafted.append((load(), max_drafts))
            return Draft((1,) * max_drafts)

    def load() -> int:
        return len(target.calls[-1]) if target.calls else 0

    def costs() -> tuple[float, ...]:
        return (1.0, 2.0, 3.0, 4.0) if load() > 2 else (1.0,) * 4

    requests = [RunRequest((0,), 5 + 6 * i, AdaptiveDrafter(Repeating(), costs, 0.01, 0.9)) for i in range(6)]
    results = speculate_batch(requests, target, 6)
    for request, result in zip(requests, results, strict=True):
        assert result.tokens == speculate(Markov(P, 200).build(), NgramDrafter(), (0,), request.max_new_tokens).tokens
    assert {most for size, most in drafted if size > 2} <= {1}, "in a large batch there are probes only"
    assert max(most for size, most in drafted if size <= 2) > 1
    assert min(len(ids) for ids in target.calls) <= 2 < max(len(ids) for ids in target.calls)


def test_requests_that_make_no_sense_run_nothing() -> None:
    target = MarkovBatch(P, 8)
    good: list[RunRequest | TreeRequest] = [RunRequest((0,), 3, drafter(0)), TreeRequest((0,), 8, drafter(3))]
    assert speculate_batch([], target, 1) == []
    for request in good:
        with pytest.raises(ValueError, match=r"requests\[1\].prompt"):
            speculate_batch([good[0], replace(request, prompt=(4,))], target, 1)
        with pytest.raises(ValueError, match=r"requests\[1\].*room for 9.*capacity is 8"):
            speculate_batch([good[0], replace(request, max_new_tokens=9)], target, 1)
        with pytest.raises(ValueError, match="max_running"):
            speculate_batch([request], target, 0)
        for wrong in ({"prompt": ()}, {"max_new_tokens": 0}, {"arrival": -1}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                replace(request, **wrong)
    with pytest.raises(ValueError, match="num_drafts"):
        RunRequest((0,), 3, drafter(0), num_drafts=-1)
    assert not target.calls
    assert len(speculate_batch(good, target, 2)[1].tokens) == 8
