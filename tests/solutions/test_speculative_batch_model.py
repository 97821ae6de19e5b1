"""The target for many texts: every text gets the logits and the features that it gets alone, trees included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from labkit.config import ModelConfig
from labkit.decoder import Decoder
from labkit.drafting import Speculation
from labkit.features import FeatureSource
from labkit.sampling_params import SamplingParams
from labkit.specs import TinyLlama
from solutions.speculative.batch_model import BatchModel
from solutions.speculative.batch_requests import RunRequest, TreeRequest
from solutions.speculative.batched import speculate_batch
from solutions.speculative.dynamic_tree import DynamicTreeDrafter
from solutions.speculative.eagle import EagleHead
from solutions.speculative.feature_drafter import FeatureDrafter
from solutions.speculative.feature_model import FeatureModel
from solutions.speculative.lookahead import LookaheadDrafter, LookaheadModel
from solutions.speculative.loop import speculate
from solutions.speculative.medusa import MedusaDrafter
from solutions.speculative.training.objectives import objective
from solutions.speculative.tree_loop import speculate_tree

CONFIG = ModelConfig.tiny(num_layers=3)
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """A small target."""
    return TinyLlama(CONFIG, seed=2, dtype=torch.float64).build()


class Twins:
    """One text alone, in float64 as the truth and in float32 as what a plain pass gets of it.

    Args:
        exact: the target in float64.
        plain: in float32.
    """

    def __init__(self, exact: Decoder, plain: Decoder) -> None:
        self.models = [FeatureModel(one, 14, LAYERS) for one in (exact, plain)]

    def append(self, *arguments: Any) -> list[Tensor]:
        """Logits of both."""
        return [model.append(*arguments) for model in self.models]

    def features(self) -> list[Tensor]:
        """Features of both."""
        return [model.features() for model in self.models]


def check(what: str, got: Tensor, right: list[Tensor]) -> None:
    """The batch, in float32, is as near to the truth as a plain pass."""
    scale = float(right[0].abs().max()) if right[0].numel() else 1.0
    check_close(what, got, right[0], scale=scale, dtype=torch.float32, plain=right[1])


def test_ragged_passes_of_text_and_trees_are_what_each_text_gets_alone(decoder: Decoder) -> None:
    plain = TinyLlama(CONFIG, seed=2).build()
    batch = BatchModel(plain, 3, 14, LAYERS)
    alone = [Twins(decoder, plain) for _ in range(3)]
    # For each text its new tokens, its drafts with their parents, and the path that it keeps.
    steps: list[dict[int, tuple[list[int], list[int], Sequence[int], list[int]]]] = [
        {0: ([1, 2, 3, 4], [], [], []), 2: ([5], [6, 7, 8, 9], [-1, -1, 1, 2], [1, 2])},
        {2: ([10], [11, 12, 13], [-1, 0, 1], [0, 1]), 1: ([9], [14, 15], [-1, -1], [1])},
        {1: ([16, 17, 18], [19, 20, 21, 22, 23], [-1, 0, 0, 2, -1], []), 0: ([24], [25, 26], [-1, 0], [0, 1]),
         2: ([27], [], [], [])},
        {0: ([28], [29, 30, 31, 32, 33], [-1, -1, 0, 1, 3], [1, 3, 4]), 1: ([34, 35], [36, 37, 38], [-1, 0, -1], [2])},
        {2: ([39], [40], [-1], [0]), 0: ([41, 42], [], [], []), 1: ([43], [44], [-1], [])},
    ]  # fmt: skip
    for step in steps:
        ids, parts = list(step), list(step.values())
        answers = batch.run(ids, [part[0] for part in parts], [part[1] for part in parts], [part[2] for part in parts])
        for index, part, logits in zip(ids, parts, answers, strict=True):
            check(f"logits of text {index}", logits, alone[index].append(*part[:3]))
        for index, part in step.items():
            batch.keep(index, part[3])
            for model in alone[index].models:
                model.keep(part[3])
        for index, twins in enumerate(alone):
            check(f"features of text {index}", batch.source(index).features(), twins.features())
    batch.truncate(1, 2)
    for model in alone[1].models:
        model.truncate(2)
    check("logits", batch.run([1], [[50]], [[51, 52]], [[-1, -1]])[0], alone[1].append([50], [51, 52], [-1, -1]))


class Heads:
    """Drafters of every kind that reads the target, with heads that nobody trained, for texts alone and together.

    Args:
        decoder: the target.
    """

    KINDS = ("EAGLE", "Medusa", "EAGLE-2", "lookahead")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        embeddings = decoder.weights["model.embed_tokens.weight"]
        outputs = {"embed_tokens.weight": embeddings, "lm_head.weight": embeddings}
        self._weights = {
            name: {
                key: weight.double() for key, weight in {**objective(name, decoder, 40, 2, 0).start, **outputs}.items()
            }
            for name in ("eagle", "medusa")
        }

    def drafter(self, kind: str, source: FeatureSource) -> Any:
        """Of one text."""
        if kind == "lookahead":
            return LookaheadDrafter(2, 3, 2)
        if kind == "Medusa":
            return MedusaDrafter(source, self._weights["medusa"], [(0,), (1,), (0, 0), (1, 0)], CONFIG.vocab_size)
        head = EagleHead(CONFIG, self._weights["eagle"])
        return (
            FeatureDrafter(source, head, SamplingParams())
            if kind == "EAGLE"
            else DynamicTreeDrafter(source, head, 8, 3, 24)
        )

    def request(self, kind: str, model: BatchModel, index: int, **common: Any) -> RunRequest | TreeRequest:
        """A text of a batch."""
        drafter = self.drafter(kind, model.source(index))
        if kind == "lookahead":
            model.let_observe(index, drafter)
        return (
            RunRequest(drafter=drafter, num_drafts=3, **common)
            if kind == "EAGLE"
            else TreeRequest(drafter=drafter, **common)
        )

    def alone(self, kind: str, capacity: int, **common: Any) -> Speculation:
        """The same text without company."""
        common.pop("arrival")
        if kind == "lookahead":
            drafter = LookaheadDrafter(2, 3, 2)
            return speculate_tree(LookaheadModel(self._decoder, capacity, drafter), drafter, **common)
        target = FeatureModel(self._decoder, capacity, (3,))
        drafter = self.drafter(kind, target)
        if kind == "EAGLE":
            return speculate(target, drafter, num_drafts=3, **common)
        return speculate_tree(target, drafter, **common)


def even(text: list[int]) -> Tensor:
    """A grammar of a kind: what may follow depends on the whole text."""
    return (torch.arange(CONFIG.vocab_size) + sum(text)) % 2 == 0


def test_every_text_of_a_mixed_batch_is_the_one_that_it_gets_alone(decoder: Decoder) -> None:
    """Runs and trees of heads that read their own text's features, and lookahead's, which observes."""
    heads, capacity, kept = Heads(decoder), 40, dict[str, int]()
    kinds = [kind for _ in range(3) for kind in Heads.KINDS]
    commons: list[dict[str, Any]] = [
        {
            "prompt": tuple((3 * i + j) % 61 for j in range(2 + i % 5)),
            "max_new_tokens": 4 + 2 * (i % 6),
            "params": SamplingParams(temperature=(0.0, 0.4, 1.0)[i % 3], top_k=(0, 5)[i % 2], seed=i),
            "stop_tokens": (7, 11) if i % 5 == 1 else (),
            "finished": (lambda tokens: tokens[-2:-1] == [9]) if i % 5 == 2 else None,
            "allowed": even if i % 7 in (3, 4, 5) else None,
            "arrival": 2 * (i % 5),
        }
        for i in range(len(kinds))
    ]
    batch = BatchModel(decoder, len(kinds), capacity, (3,))
    requests = [
        heads.request(kind, batch, index, **common)
        for index, (kind, common) in enumerate(zip(kinds, commons, strict=True))
    ]
    results = speculate_batch(requests, batch, 5)
    for index, (kind, common, result) in enumerate(zip(kinds, commons, results, strict=True)):
        assert result == heads.alone(kind, capacity, **common), f"text {index}, {kind}, {common}"
        assert len(batch.features_of(index)) == len(common["prompt"]) + len(result.tokens) - 1
        kept[kind] = kept.get(kind, 0) + sum(round_.accepted for round_ in result.rounds)
    assert all(kept.values()), f"a drafter of which nothing is kept shows nothing: {kept}"


def test_lookahead_learns_in_a_batch(decoder: Decoder) -> None:
    """Without observing it never has more than the spine; with it the rounds are those of the loop alone."""
    rounds = []
    for observes in (False, True):
        batch = BatchModel(decoder, 1, 120)
        drafter = LookaheadDrafter(3, 3, 3)
        if observes:
            batch.let_observe(0, drafter)
        [result] = speculate_batch([TreeRequest((1, 2, 3), 40, drafter)], batch, 1)
        rounds.append([round_.drafted for round_ in result.rounds])
    assert max(rounds[0]) == 3 < max(rounds[1])


def test_what_does_not_fit_runs_nothing(decoder: Decoder) -> None:
    batch = BatchModel(decoder, 2, 5)
    batch.run([0], [[1, 2, 3]], [[]], [[]])
    calls: list[tuple[list[int], list[list[int]], list[list[int]], list[Sequence[int]], str]] = [
        ([], [], [], [], "texts"),
        ([1, 1], [[1], [1]], [[], []], [[], []], "different texts"),
        ([2], [[1]], [[]], [[]], "from 0 to 1"),
        ([-1], [[1]], [[]], [[]], "from 0 to 1"),
        ([0, 1], [[1]], [[], []], [[], []], "for each"),
        ([0, 1], [[1], [1]], [[]], [[], []], "for each"),
        ([1], [[]], [[]], [[]], "text 1: tokens must hold at least one"),
        ([1, 0], [[1], [1, 2]], [[], [3]], [[], [-1]], "text 0: 3 new tokens exceed the capacity: there is room for 2"),
        ([1], [[61]], [[]], [[]], r"text 1: tokens\[0\]"),
        ([1], [[1]], [[61]], [[-1]], r"text 1: drafts\[0\]"),
        ([1], [[1]], [[2, 3]], [[-1]], "text 1: 2 drafts need as many parents"),
    ]
    for ids, tokens, drafts, parents, words in calls:
        with pytest.raises(ValueError, match=words):
            batch.run(ids, tokens, drafts, parents)
    batch.run([1], [[1]], [[2, 3, 4]], [[-1, -1, 0]])
    with pytest.raises(ValueError, match="text 1: 3 drafts are still here"):
        batch.run([0, 1], [[1], [1]], [[], []], [[], []])
    with pytest.raises(ValueError, match="3 drafts are still here"):
        batch.truncate(1, 1)
    for path in ([3], [-1], [2, 0], [0, 0]):
        with pytest.raises(ValueError, match="path must rise within the 3 drafts"):
            batch.keep(1, path)
    assert [len(batch.features_of(index)) for index in (0, 1)] == [3, 4]
    batch.keep(1, [0, 2])
    for length in (-1, 4, True):
        with pytest.raises(ValueError, match="length"):
            batch.truncate(0, length)
    for arguments in ((0, 4), (2, 0)):
        with pytest.raises(ValueError, match="must be"):
            BatchModel(decoder, *arguments)
    assert [len(batch.features_of(index)) for index in (0, 1)] == [3, 3]
    assert batch.run([0], [[4]], [[5]], [[-1]])[0].shape == (2, CONFIG.vocab_size)
