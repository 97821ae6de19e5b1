"""The target for many texts: every text gets the logits and the features that it gets alone."""

from __future__ import annotations

import pytest
import torch

from labkit.config import ModelConfig
from labkit.decoder import Decoder
from labkit.sampling_params import SamplingParams
from labkit.specs import TinyLlama
from solutions.speculative.batch_model import BatchModel
from solutions.speculative.batched import SpeculativeRequest, speculate_batch
from solutions.speculative.eagle import EagleHead
from solutions.speculative.feature_drafter import FeatureDrafter
from solutions.speculative.feature_model import FeatureModel
from solutions.speculative.loop import speculate
from solutions.speculative.training.objectives import objective

CONFIG = ModelConfig.tiny(num_layers=3)
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """A small target."""
    return TinyLlama(CONFIG, seed=2, dtype=torch.float64).build()


def test_ragged_passes_are_what_each_text_gets_alone(decoder: Decoder) -> None:
    batch = BatchModel(decoder, 3, 9, LAYERS)
    alone = [FeatureModel(decoder, 9, LAYERS) for _ in range(3)]
    steps = [
        ([0, 2], [[1, 2, 3, 4], [5]], {}),
        ([2, 1], [[6, 7, 8], [9]], {2: 2}),
        ([1, 0, 2], [[10, 11, 12, 13, 14, 15, 16, 17], [18], [19, 20]], {0: 1, 1: 7}),
        ([0, 1], [[21, 22], [23, 24]], {}),
    ]
    for ids, tokens, forgotten in steps:
        for index, new, logits in zip(ids, tokens, batch.run(ids, tokens), strict=True):
            torch.testing.assert_close(logits, alone[index].append(new))
        for index, length in forgotten.items():
            batch.truncate(index, length)
            alone[index].truncate(length)
        for index, model in enumerate(alone):
            torch.testing.assert_close(batch.source(index).features(), model.features())


def test_drafters_of_a_batch_read_the_features_of_their_own_text(decoder: Decoder) -> None:
    embeddings = decoder.weights["model.embed_tokens.weight"]
    start = objective("eagle", decoder, 40, 1, 0).start
    weights = {**start, "embed_tokens.weight": embeddings, "lm_head.weight": embeddings}
    weights = {name: weight.double() for name, weight in weights.items()}
    prompts = [tuple((3 * i + j) % 61 for j in range(2 + i)) for i in range(5)]
    params = [SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i) for i in range(5)]
    batch = BatchModel(decoder, 5, 30, (3,))
    requests = [
        SpeculativeRequest(
            prompts[i], 9, FeatureDrafter(batch.source(i), EagleHead(CONFIG, weights), SamplingParams()), params[i], 3,
            arrival=2 * i,
        )
        for i in range(5)
    ]  # fmt: skip
    results = speculate_batch(requests, batch.run, batch.truncate, CONFIG.vocab_size, 3)
    for i, result in enumerate(results):
        target = FeatureModel(decoder, 30, (3,))
        drafter = FeatureDrafter(target, EagleHead(CONFIG, weights), SamplingParams())
        assert result == speculate(target, drafter, prompts[i], 9, params[i], 3)


def test_what_does_not_fit_runs_nothing(decoder: Decoder) -> None:
    batch = BatchModel(decoder, 2, 4)
    batch.run([0], [[1, 2, 3]])
    for ids, tokens, words in (
        ([], [], "0 texts"),
        ([0, 1], [[1]], "2 texts"),
        ([1], [[]], "at least one token"),
        ([1, 0], [[1], [1, 2]], "exceed the capacity"),
    ):
        with pytest.raises(ValueError, match=words):
            batch.run(ids, tokens)
    for length in (-1, 4, True):
        with pytest.raises(ValueError, match="length"):
            batch.truncate(0, length)
    for arguments in ((0, 4), (2, 0)):
        with pytest.raises(ValueError, match="must be"):
            BatchModel(decoder, *arguments)
    assert [len(batch.features_of(index)) for index in (0, 1)] == [3, 0]
    assert batch.run([0], [[4]])[0].shape == (1, CONFIG.vocab_size)
