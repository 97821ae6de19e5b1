"""The oracle and the judge of greedy runs: right runs pass, wrong ones don't hide behind ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grader.judge.oracle import GreedyJudge, Oracle, ReadAhead
from grader.judge.scripted import RecordingModel, RecordingStore
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights

PROMPT = [3, 1, 4]


class TableModel:
    """Logits of 5 tokens that depend on the length of the context only."""

    def __init__(self, *, error: float = 0.0) -> None:
        self.error = error
        self.runs = 0

    def __call__(self, tokens: list[int]) -> Tensor:
        self.runs += 1
        rows = torch.stack([torch.arange(5, dtype=torch.float64).roll(n) for n in range(1, len(tokens) + 1)])
        return rows + self.error


def greedy_judge() -> GreedyJudge:
    """Oracle and plain run are the same table, so only a few roundings are explained."""
    return GreedyJudge(ReadAhead(TableModel()), list(PROMPT), ReadAhead(TableModel()))


def test_right_logits_lead_to_the_oracles_tokens() -> None:
    judge, model = greedy_judge(), TableModel()
    for step in range(4):
        token = judge.choose(model([*PROMPT, *judge.tokens])[-1].float(), step)
        assert token == judge.tokens[step]
    assert judge.tokens == [int(row.argmax()) for row in TableModel()([0] * 6)[2:]]
    judge.check_ties(4)


@pytest.mark.parametrize("spoil", [lambda x: x + 0.01, lambda x: x.roll(1), torch.zeros_like, lambda x: x * torch.nan])
def test_wrong_logits_fail_and_are_no_ties(spoil) -> None:  # type: ignore[no-untyped-def]
    judge = greedy_judge()
    with pytest.raises(AssertionError, match="logits are off by"):
        judge.choose(spoil(TableModel()(PROMPT)[-1].float()), 0)


def test_logits_of_another_form_fail() -> None:
    row = TableModel()(PROMPT)[-1].float()
    for bad in (row[:4], row.unsqueeze(0), row.double(), None):
        with pytest.raises(AssertionError, match="the logits at step 0 must"):
            greedy_judge().choose(bad, 0)


def test_a_near_tie_is_counted_and_the_oracle_decides() -> None:
    tied = torch.tensor([[0.0, 4.0, 4.0 - 1e-7]], dtype=torch.float64)
    judge = GreedyJudge(ReadAhead(lambda tokens: tied), [0], ReadAhead(lambda tokens: tied))
    given = torch.tensor([0.0, 4.0 - 1e-6, 4.0])
    assert judge.choose(given, 0) == 1
    assert judge.ties == 1
    judge.check_ties(100)
    judge.ties = 2
    with pytest.raises(AssertionError, match="too many"):
        judge.check_ties(100)
    judge.check_ties(2_000)


def test_prefixes_of_a_known_sequence_cost_nothing() -> None:
    run = TableModel()
    known = ReadAhead(run)
    known.ahead([1, 2, 3, 4])
    for length in (1, 3, 4):
        assert torch.equal(known.after([1, 2, 3, 4][:length]), TableModel()([0] * length)[-1])
    assert run.runs == 1
    known.after([1, 2, 9])
    assert run.runs == 2


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_oracle_agrees_with_the_given_decoder(architecture: str, tied: bool) -> None:
    config = ModelConfig.tiny(architecture=architecture, tie_embeddings=tied)
    weights = random_weights(config, 7, torch.float64)
    tokens = [5, 60, 0, 33, 33, 12]
    own = Decoder(config, weights, torch.float64)(torch.tensor([tokens]), torch.arange(6), full_attention)[0]
    torch.testing.assert_close(Oracle(config, weights).logits(tokens), own, atol=1e-9, rtol=0)


def test_oracle_refuses_weights_of_another_model() -> None:
    config = ModelConfig.tiny()
    weights = random_weights(config, 7)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        Oracle(config, weights)


def test_stand_ins_write_down_what_they_are_asked() -> None:
    store = RecordingStore(2, 8)
    k = torch.randn(1, 2, 3, 4)
    for layer in (0, 1):
        keys, _ = store.append(layer, k, k)
        assert torch.equal(keys, k)
    assert store.length() == 3 and store.appends == [(0, 3, 3), (1, 3, 3)]
    store.append(0, k[:, :, :1], k[:, :, :1])
    assert store.length() == 3, "layer 1 still holds 3"
    store.truncate(2)
    assert store.length() == 2 and store.truncations == [2]
    for bad in (lambda: store.append(2, k, k), lambda: store.append(0, k[0], k), lambda: store.append(0, k[:, :1], k)):
        with pytest.raises(AssertionError):
            bad()
    model = RecordingModel(5, 9, lambda tokens: len(tokens) % 5, held=[1])
    assert model.append([2, 3]).argmax(-1).tolist() == [2, 3]
    assert model.calls == [[2, 3]] and model.length() == 3
    for tokens in ([], [5], [-1]):
        with pytest.raises(AssertionError):
            model.append(tokens)
