"""A head at work: its rows are kept and forgotten, whoever sees whom, and its vocabulary is the target's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from labkit.config import ModelConfig
from labkit.decoder import Attend, full_attention, random_weights
from labkit.decoder_layer import decoder_layer, rms_norm
from labkit.draft_head import CachedHead, check_draft_vocabulary, spread

CONFIG = ModelConfig.tiny(num_layers=1)


class AddingHead(CachedHead):
    """Adds the embedding to the state, then runs a layer."""

    def step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass."""
        joined = hidden + self.weights["embed_tokens.weight"][tokens]
        return decoder_layer(self.config, self.weights, joined, positions, attend)


def weights(drafts: int = CONFIG.vocab_size) -> dict[str, Tensor]:
    """A random head."""
    block = "model.layers.0."
    given = random_weights(CONFIG, 3, torch.float64)
    made = {"layer." + name.removeprefix(block): w for name, w in given.items() if name.startswith(block)}
    made["embed_tokens.weight"] = given["model.embed_tokens.weight"]
    made["lm_head.weight"] = given["model.embed_tokens.weight"][:drafts].clone()
    return made


def test_rows_read_piece_by_piece_are_those_read_at_once() -> None:
    hidden = torch.randn(6, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, places = torch.tensor([5, 6, 7, 8, 9, 10]), torch.arange(6)
    joined = hidden + weights()["embed_tokens.weight"][tokens]
    whole = decoder_layer(CONFIG, weights(), joined[None], places, full_attention)[0]
    head = AddingHead(CONFIG, weights())
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for start, end in ((0, 3), (3, 4), (4, 6)):
        got = head.append(hidden[start:end], tokens[start:end], places[start:end], causal[start:end, :end])
        assert head.length == end
        check_close(f"rows {start} to {end}", got, whole[start:end], scale=500.0, dtype=torch.float64)
    head.truncate(2)
    got = head.append(hidden[2:], tokens[2:], places[2:], causal[2:])
    assert head.length == 6
    check_close("rows behind 2, once more", got, whole[2:], scale=500.0, dtype=torch.float64)
    # Siblings: rows 4 and 5 both follow row 3, at one place.
    head.truncate(4)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]], dtype=torch.bool)
    got = head.append(hidden[4].repeat(2, 1), tokens[[4, 4]], torch.tensor([4, 4]), mask)
    check_close("siblings", got, whole[4].repeat(2, 1), scale=500.0, dtype=torch.float64)


def test_logits_speak_of_the_target_s_vocabulary() -> None:
    hidden = torch.randn(3, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain = AddingHead(CONFIG, weights())
    assert torch.equal(plain.logits(hidden), hidden @ weights()["lm_head.weight"].T)
    norm = torch.linspace(0.5, 1.5, 24, dtype=torch.float64)
    normed = AddingHead(CONFIG, weights() | {"norm.weight": norm})
    assert torch.equal(normed.logits(hidden), plain.logits(rms_norm(hidden, norm, CONFIG.norm_eps)))
    ids = torch.tensor([9, 60, 0, 33])
    pruned = AddingHead(CONFIG, weights(4), ids)
    got = pruned.logits(hidden)
    assert got.shape == (3, 61) and torch.equal(got[:, ids], hidden @ weights(4)["lm_head.weight"].T)
    others = [token for token in range(61) if token not in ids.tolist()]
    assert bool((got[:, others] == -torch.inf).all()) and pruned.vocab_size == 61
    assert torch.equal(pruned.read(hidden), hidden)


def test_spread_keeps_the_axes() -> None:
    logits = torch.arange(6.0).reshape(2, 3)
    wide = spread(logits, torch.tensor([4, 0, 1]), 5)
    inf = torch.inf
    assert torch.equal(wide, torch.tensor([[1, 2, -inf, -inf, 0], [4, 5, -inf, -inf, 3]]))
    assert torch.equal(spread(logits[0], torch.tensor([4, 0, 1]), 5), wide[0])
    assert spread(logits, None, 3) is logits


def test_vocabularies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="embed_tokens"):
        AddingHead(CONFIG, weights() | {"embed_tokens.weight": torch.zeros(5, 24)})
    for name in ("embed_tokens.weight", "lm_head.weight"):
        with pytest.raises(ValueError, match=name):
            AddingHead(CONFIG, {key: weight for key, weight in weights().items() if key != name})
    check_draft_vocabulary(torch.tensor([4, 2]), 2, 5)
    for ids, size in ((None, 4), (torch.tensor([4, 2]), 3), (torch.tensor([4, 4]), 2), (torch.tensor([4, 5]), 2),
                      (torch.tensor([-1, 2]), 2), (torch.tensor([4.0, 2.0]), 2)):  # fmt: skip
        with pytest.raises(ValueError, match="target_ids"):
            check_draft_vocabulary(ids, size, 5)
    with pytest.raises(NotImplementedError, match="CachedHead"):
        CachedHead(CONFIG, weights()).append(
            torch.zeros(1, 24), torch.tensor([1]), torch.tensor([0]), torch.ones(1, 1, dtype=torch.bool)
        )
