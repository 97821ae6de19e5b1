"""Batched speculation: every request gets the tokens that it gets alone, by one pass and one verification a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import solutions.speculative.batched as batched
from grader.judge.distributions import chi_square
from labkit.drafting import Draft, Drafter
from labkit.protocols import CachedModel
from labkit.sampling_params import SamplingParams
from labkit.specs import Markov
from solutions.speculative.adaptive import AdaptiveDrafter
from solutions.speculative.batched import SpeculativeRequest, speculate_batch
from solutions.speculative.loop import speculate
from solutions.speculative.model_drafter import ModelDrafter
from solutions.speculative.ngram import NgramDrafter

P = ((0.5, 0.2, 0.2, 0.1), (0.1, 0.6, 0.1, 0.2), (0.3, 0.0, 0.3, 0.4), (0.25, 0.25, 0.25, 0.25))
Q = ((0.1, 0.5, 0.2, 0.2), (0.3, 0.2, 0.3, 0.2), (0.1, 0.3, 0.3, 0.3), (0.7, 0.1, 0.1, 0.1))


class Target:
    """A model for many sequences that writes its calls down."""

    def __init__(self) -> None:
        self.models: dict[int, CachedModel] = {}
        self.calls: list[list[int]] = []
        self.longest = 0

    def run(self, ids: list[int], tokens: list[list[int]]) -> list[Tensor]:
        """One row of logits for each new token."""
        self.calls.append(ids)
        answers = []
        for index, new in zip(ids, tokens, strict=True):
            model = self.models.setdefault(index, Markov(P, 200).build())
            answers.append(model.append(new))
            self.longest = max(self.longest, model.length)
        return answers

    def truncate(self, index: int, length: int) -> None:
        """Forget the end of one sequence."""
        self.models[index].truncate(length)


class Outsider:
    """Drafts tokens that the target doesn't have, from a vocabulary of seven."""

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Every third token is unknown."""
        drafts = tuple((len(tokens) + i) % 3 + (4 if (len(tokens) + i) % 3 == 2 else 0) for i in range(max_drafts))
        return Draft(drafts, torch.full((max_drafts, 7), 1 / 7))


def drafter(kind: int) -> Drafter:
    """One of several kinds, fresh."""
    if kind == 0:
        return ModelDrafter(Markov(Q, 200).build(), SamplingParams())
    return (NgramDrafter(3, 1), Outsider())[kind - 1]


def allowed(text: list[int]) -> Tensor:
    """No token twice in a row."""
    return torch.arange(4) != text[-1]


def mixed_requests() -> list[SpeculativeRequest]:
    """Settings, seeds, drafters, lengths and arrivals of all sorts."""
    return [
        SpeculativeRequest(
            prompt=tuple((i + j) % 4 for j in range(1 + i % 5)),
            max_new_tokens=1 + (7 * i) % 23,
            drafter=drafter(i % 3),
            params=SamplingParams(temperature=(0.0, 1.0, 0.6)[i % 3 - i % 2], top_k=(0, 3)[i % 2], seed=i),
            num_drafts=i % 6,
            stop_tokens=((), (3,))[i % 4 == 1],
            finished=(lambda tokens: len(tokens) == 9) if i % 5 == 2 else None,
            allowed=allowed if i % 7 == 3 else None,
            arrival=(3 * i) % 11 if i < 18 else 60 + i,
        )
        for i in range(20)
    ]


def alone(request: SpeculativeRequest, kind: int) -> tuple[int, ...]:
    """The request's text without any company."""
    result = speculate(
        Markov(P, 200).build(), drafter(kind), request.prompt, request.max_new_tokens, request.params,
        request.num_drafts, request.stop_tokens, request.finished, request.allowed,
    )  # fmt: skip
    return result.tokens


@pytest.mark.parametrize("places", [1, 2, 5, 20])
def test_each_request_gets_the_tokens_that_it_gets_alone(places: int) -> None:
    requests, target = mixed_requests(), Target()
    results = speculate_batch(requests, target.run, target.truncate, 4, places)
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        assert result.tokens == alone(request, index % 3)
        assert sum(round_.emitted for round_ in result.rounds) == len(result.tokens)
        assert target.models[index].length == len(request.prompt) + len(result.tokens) - 1
        assert sum(index in ids for ids in target.calls) == len(result.rounds)
    assert max(len(ids) for ids in target.calls) <= places
    assert target.longest <= max(len(request.prompt) + request.max_new_tokens - 1 for request in requests)


def test_a_step_is_one_pass_and_one_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []
    original = batched.verify

    def counting(*args: Tensor) -> tuple[Tensor, Tensor]:
        verified.append(len(args[0]))
        return original(*args)

    monkeypatch.setattr(batched, "verify", counting)
    requests, target = mixed_requests(), Target()
    speculate_batch(requests, target.run, target.truncate, 4, 6)
    assert verified == [len(ids) for ids in target.calls]
    assert max(verified) == 6


def test_a_place_is_given_on_as_soon_as_it_is_free() -> None:
    requests = [replace(request, arrival=0) for request in mixed_requests()]
    target = Target()
    results = speculate_batch(requests, target.run, target.truncate, 4, 4)
    joined = [index for ids in target.calls for index in ids]
    assert list(dict.fromkeys(joined)) == list(range(20))
    left = [len(result.rounds) for result in results]
    for ids in target.calls:
        for index in ids:
            left[index] -= 1
        # Fewer than four run only when nobody waits any more.
        assert len(ids) == 4 or 19 in ids or left[19] == 0
    assert not any(left)


def test_first_tokens_of_a_batch_follow_the_target() -> None:
    # 600 requests in one batch; right code fails with probability 1e-6 for each of the two tokens.
    requests = [
        SpeculativeRequest((0,), 3, drafter(0), SamplingParams(seed=1000 + i), num_drafts=1 + i % 2) for i in range(600)
    ]
    target = Target()
    results = speculate_batch(requests, target.run, target.truncate, 4, 600)
    p = torch.tensor(P, dtype=torch.float64)
    law = p[0]
    for place in range(2):
        got = chi_square(torch.tensor([result.tokens[place] for result in results]), law)
        assert got.p_value > 1e-6, f"token {place}: p-value {got.p_value:.1e}"
        law = law @ p


def test_the_number_of_drafts_may_follow_the_load() -> None:
    target, drafted = Target(), list[tuple[int, int]]()

    class Repeating:
        def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
            drafted.append((load(), max_drafts))
            return Draft((1,) * max_drafts)

    def load() -> int:
        return len(target.calls[-1]) if target.calls else 0

    def costs() -> tuple[float, ...]:
        return (1.0, 2.0, 3.0, 4.0) if load() > 2 else (1.0,) * 4

    requests = [SpeculativeRequest((0,), 5 + 6 * i, AdaptiveDrafter(Repeating(), costs, 0.01, 0.9)) for i in range(6)]
    results = speculate_batch(requests, target.run, target.truncate, 4, 6)
    for request, result in zip(requests, results, strict=True):
        assert result.tokens == speculate(Markov(P, 200).build(), NgramDrafter(), (0,), request.max_new_tokens).tokens
    assert {most for size, most in drafted if size > 2} <= {1}, "in a large batch there are probes only"
    assert max(most for size, most in drafted if size <= 2) > 1
    assert min(len(ids) for ids in target.calls) <= 2 < max(len(ids) for ids in target.calls)


def test_requests_that_make_no_sense_run_nothing() -> None:
    target = Target()
    good = SpeculativeRequest((0,), 3, drafter(0))
    assert speculate_batch([], target.run, target.truncate, 4, 1) == []
    with pytest.raises(ValueError, match=r"requests\[1\].prompt"):
        speculate_batch([good, replace(good, prompt=(4,))], target.run, target.truncate, 4, 1)
    with pytest.raises(ValueError, match="max_running"):
        speculate_batch([good], target.run, target.truncate, 4, 0)
    for wrong in ({"prompt": ()}, {"max_new_tokens": 0}, {"num_drafts": -1}, {"arrival": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(good, **wrong)
    assert not target.calls
