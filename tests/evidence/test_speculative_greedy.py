"""Speculation changes no token of a greedy run of the real model, whoever drafts, alone or in company."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.oracle import MOST_TIES, GreedyJudge, Oracle, ReadAhead
from labkit.checkpoints import Model, load
from labkit.decoder import full_attention
from labkit.drafting import Round
from labkit.workloads import WORKLOADS, prompts
from solutions.speculative.batch_model import BatchModel
from solutions.speculative.batched import speculate_batch
from solutions.speculative.feature_model import FeatureModel
from solutions.speculative.lookahead import LookaheadModel
from solutions.speculative.measuring import acceptance_estimate, tokens_per_round
from solutions.speculative.trained_drafters import RUNS, TREES, TrainedDrafters, generate
from tests.evidence.conftest import Length

CHARACTERS = 160
"""Of source or docstring in a prompt: long enough to be copied from, short enough for so many runs."""
ROOM = 16
"""For drafts behind a text."""
COMPANY = 8
"""Texts that run at a time."""
NUM_DRAFTS = 3


class Remembering:
    """Keeps the logits after each token of the text, so that they can be judged afterwards."""

    rows: list[Tensor]

    def append(self, tokens: Any, drafts: Any = (), parents: Any = ()) -> Tensor:
        logits: Tensor = super().append(tokens, drafts, parents)  # type: ignore[misc]
        self.rows = [*getattr(self, "rows", []), *logits]
        return logits

    def keep(self, path: Any) -> None:
        text = self.length - self._num_drafts  # type: ignore[attr-defined]
        self.rows = self.rows[:text] + [self.rows[text + index] for index in path]
        super().keep(path)  # type: ignore[misc]

    def truncate(self, length: int) -> None:
        super().truncate(length)  # type: ignore[misc]
        self.rows = self.rows[:length]


class RememberingFeatures(Remembering, FeatureModel):
    """The target of all drafters but one."""


class RememberingLookahead(Remembering, LookaheadModel):
    """The target that lookahead's drafter reads along with."""


class RememberingBatch(BatchModel):
    """The target of a batch; keeps the logits after each token of each text."""

    def run(self, ids: Any, tokens: Any, drafts: Any, parents: Any) -> list[Tensor]:
        answers = super().run(ids, tokens, drafts, parents)
        self.rows: dict[int, list[Tensor]] = getattr(self, "rows", {})
        for index, logits in zip(ids, answers, strict=True):
            self.rows[index] = [*self.rows.get(index, []), *logits]
        return answers

    def keep(self, index: int, path: Any) -> None:
        text = len(self.features_of(index)) - self._num_drafts[index]
        self.rows[index] = self.rows[index][:text] + [self.rows[index][text + draft] for draft in path]
        super().keep(index, path)


@dataclass
class Tally:
    """What became of the texts of one kind of drafter.

    Args:
        rounds: of all texts.
        tokens: that were judged.
        ties: of them.
        worst: the largest error of a logit.
    """

    rounds: list[Round] = field(default_factory=list)
    tokens: int = 0
    ties: int = 0
    worst: float = 0.0

    def line(self) -> str:
        """For the record."""
        alpha = acceptance_estimate(self.rounds) if any(r.drafted and r.emitted for r in self.rounds) else 0.0
        return (
            f"{self.tokens} tokens equal, {self.ties} near-ties, largest logit error {self.worst:.1e}, "
            f"{tokens_per_round(self.rounds):.2f} tokens a round, acceptance {alpha:.2f}"
        )


@dataclass(frozen=True)
class Judged:
    """A prompt, and the two models that judge what follows it; a sequence that was run is not run again."""

    prompt: list[int]
    oracle: ReadAhead
    plain: ReadAhead


@pytest.fixture(scope="module")
def model() -> Model:
    """The bundled model in float32."""
    return load("smollm2")


@pytest.fixture(scope="module")
def drafters(model: Model) -> TrainedDrafters:
    """The trained heads."""
    return TrainedDrafters(model.decoder)


def workload_prompts(model: Model, length: Length) -> dict[str, list[list[int]]]:
    """As many prompts of each workload."""
    each = math.ceil(length.prompts / len(WORKLOADS))
    return {workload: prompts(workload, model.tokenizer, each, CHARACTERS) for workload in WORKLOADS}


def judged(tally: Tally, prompt: Judged, tokens: list[int], rows: list[Tensor], before: list[int]) -> list[int]:
    """The tokens of a run that are right, up to the first near-tie, from which the oracle's token goes on.

    Args:
        tally: of the drafter.
        prompt: with its judges.
        tokens: what was generated behind `before`.
        rows: the logits that each of them was taken from.
        before: tokens that had been generated.
    """
    judge = GreedyJudge(prompt.oracle, prompt.prompt, prompt.plain, tokens=list(before))
    judge.read_ahead([*before, *tokens])
    for token, logits in zip(tokens, rows, strict=True):
        assert token == int(logits.argmax()), f"token {len(judge.tokens)} is {token}, its logits prefer another"
        if judge.choose(logits, len(judge.tokens)) != token:
            break
    tally.tokens += len(judge.tokens) - len(before)
    tally.ties += judge.ties
    tally.worst = max(tally.worst, judge.worst_error)
    return judge.tokens


def alone(tally: Tally, kind: str, drafters: TrainedDrafters, prompt: Judged, count: int) -> list[int]:
    """One text by one drafter, every token judged."""
    text: list[int] = []
    while len(text) < count:
        context = prompt.prompt + text
        capacity = len(prompt.prompt) + count + ROOM
        target, drafter = drafters.pair(
            kind, capacity, feature_model=RememberingFeatures, lookahead_model=RememberingLookahead
        )
        done = generate(kind, target, drafter, context, count - len(text), num_drafts=NUM_DRAFTS)
        tally.rounds += done.rounds
        rows = target.rows[len(context) - 1 :][: len(done.tokens)]
        text = judged(tally, prompt, list(done.tokens), rows, text)
    return text


def together(tally: Tally, kind: str, drafters: TrainedDrafters, given: list[Judged], count: int) -> list[list[int]]:
    """A text for each prompt, in one batch, every token judged."""
    texts: list[list[int]] = [[] for _ in given]
    while unfinished := [index for index, text in enumerate(texts) if len(text) < count]:
        capacity = max(len(prompt.prompt) for prompt in given) + count + ROOM
        model = RememberingBatch(drafters.decoder, len(unfinished), capacity, drafters.layers(kind))
        contexts = [given[index].prompt + texts[index] for index in unfinished]
        requests = [
            drafters.request(kind, model, place, context, count - len(texts[index]), num_drafts=NUM_DRAFTS)
            for place, (index, context) in enumerate(zip(unfinished, contexts, strict=True))
        ]
        results = speculate_batch(requests, model, COMPANY)
        for place, (index, done) in enumerate(zip(unfinished, results, strict=True)):
            tally.rounds += done.rounds
            own = model.rows[place][len(contexts[place]) - 1 :][: len(done.tokens)]
            texts[index] = judged(tally, given[index], list(done.tokens), own, texts[index])
    return texts


def test_greedy_text_is_plain_decoding_s_token_for_token(
    model: Model, drafters: TrainedDrafters, length: Length
) -> None:
    """Judged by the model in float64, which recomputes everything; ties follow the rule of the greedy judge."""
    run = Oracle(model.config, model.decoder.weights).logits
    count = length.new_tokens // 4
    single, batch = ({kind: Tally() for kind in (*RUNS, *TREES)} for _ in range(2))
    for workload, those in workload_prompts(model, length).items():
        given = [
            Judged(
                prompt, ReadAhead(run),
                ReadAhead(lambda ids: model.decoder(torch.tensor([ids]), torch.arange(len(ids)), full_attention)[0]),
            )
            for prompt in those
        ]  # fmt: skip
        for prompt in given:
            for kind, tally in single.items():
                assert len(alone(tally, kind, drafters, prompt, count)) == count, f"{workload}, {kind}"
        for kind, tally in batch.items():
            assert all(len(text) == count for text in together(tally, kind, drafters, given, count))
    for company, tallies in (("alone", single), (f"batches of {COMPANY}", batch)):
        for kind, tally in tallies.items():
            print(f"{kind}, {company}: {tally.line()}")
            assert tally.ties <= max(1, MOST_TIES * tally.tokens), f"{kind}, {company}: too many near-ties to be chance"
