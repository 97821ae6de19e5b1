"""Heads on disk: four bits and back, the card, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from labkit.checkpoints import CheckpointError, load_decoder
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention
from labkit.protocols import CachedModel
from labkit.specs import TinyLlama
from labkit.trained_heads import HEADS, DraftModel, head_file, load_head, read_card, save_head
from labkit.trained_heads.loading import describe_head
from labkit.trained_heads.packing import GROUP_SIZE, pack, quantized, unpack

CONFIG = ModelConfig.tiny(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=97, intermediate_size=96)


@pytest.fixture
def target() -> Decoder:
    """A model to draft for."""
    return TinyLlama(CONFIG, seed=3).build()


def draft_weights() -> tuple[ModelConfig, dict[str, Tensor]]:
    """A small model of two layers without embeddings."""
    config = replace(CONFIG, num_layers=2, intermediate_size=64)
    weights = TinyLlama(config, seed=4).build().weights
    return config, {name: weight for name, weight in weights.items() if name != "model.embed_tokens.weight"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with one head, the draft model, for every other token."""
    config, weights = draft_weights()
    save_head("draft", weights, torch.arange(0, 97, 2), config, (), {"steps": 7}, tmp_path)
    return tmp_path


def test_packing_gives_back_the_nearest_of_fifteen_numbers() -> None:
    chance = torch.Generator().manual_seed(1)
    matrix = torch.randn(5, 3 * GROUP_SIZE, generator=chance) * torch.logspace(-3, 3, 5)[:, None]
    matrix[2, :GROUP_SIZE] = 0
    weights = {"a.weight": matrix, "a.bias": torch.tensor([0.5, -2.0, 0.0])}
    stored = pack(weights)
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in stored.items()} == {
        "a.weight.int4": (torch.uint8, [5, 48]), "a.weight.scales": (torch.float16, [5, 3]),
        "a.bias": (torch.float16, [3]),
    }  # fmt: skip
    back = unpack(stored)
    assert torch.equal(back["a.weight"], quantized(matrix)) and torch.equal(back["a.bias"], weights["a.bias"])
    scales = stored["a.weight.scales"].float().repeat_interleave(GROUP_SIZE, 1)
    numbers = torch.arange(-7.0, 8.0)[:, None, None] * scales
    nearest = (numbers - matrix).abs().amin(0)
    # Rounding the scale to half precision moves the ends by 2^-11 of them.
    assert bool(((back["a.weight"] - matrix).abs() <= nearest + 1e-6 * scales).all())
    assert torch.equal(quantized(quantized(matrix)), quantized(matrix))


def test_what_cannot_be_packed_is_refused() -> None:
    assert set(pack({"x": torch.ones(2, GROUP_SIZE)})) == {"x.int4", "x.scales"}
    for wrong, words in (
        (torch.ones(2, GROUP_SIZE + 1), "multiple of 32"),
        (torch.full((2, GROUP_SIZE), torch.nan), "not finite"),
        (torch.ones(2, 2, GROUP_SIZE), "vector"),
    ):
        with pytest.raises(ValueError, match=words):
            pack({"x": wrong})
    stored = pack({"x": torch.ones(2, GROUP_SIZE)})
    with pytest.raises(ValueError, match="don't fit"):
        unpack({"x.int4": stored["x.int4"]})
    with pytest.raises(ValueError, match="don't fit"):
        unpack({"x.int4": stored["x.int4"], "x.scales": stored["x.scales"][:1]})


def test_a_head_comes_back_with_what_it_shares_with_its_target(target: Decoder, saved: Path) -> None:
    config, weights = draft_weights()
    head = load_head("draft", target, saved)
    assert head.config == config and head.layers == () and head.card["steps"] == 7
    assert torch.equal(head.target_ids, torch.arange(0, 97, 2))
    embeddings = target.weights["model.embed_tokens.weight"]
    assert head.weights["embed_tokens.weight"] is embeddings
    assert torch.equal(head.weights["lm_head.weight"], embeddings[::2])
    for name, weight in weights.items():
        expected = weight.half().float() if weight.dim() == 1 else quantized(weight)
        assert torch.equal(head.weights[name], expected), name


def test_missing_and_damaged_heads_are_refused(target: Decoder, saved: Path, tmp_path: Path) -> None:
    assert load_head("draft", target, saved).weights
    with pytest.raises(ValueError, match="must be one of"):
        load_head("oracle", target, saved)
    with pytest.raises(ValueError, match=r"'eagle' is not in .*solutions.speculative.train eagle"):
        load_head("eagle", target, saved)
    stranger = TinyLlama(replace(CONFIG, vocab_size=98), seed=3).build()
    with pytest.raises(ValueError, match="was trained for"):
        load_head("draft", stranger, saved)
    path = head_file("draft", saved)
    whole = bytearray(path.read_bytes())
    for damaged in (bytes(whole[:-1]), bytes(whole[:-1]) + bytes([whole[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not the file that"):
            load_head("draft", target, saved)
    path.unlink()
    with pytest.raises(ValueError, match="is not in"):
        load_head("draft", target, saved)
    (saved / "card.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_head("draft", target, saved)


def test_a_second_head_leaves_the_first_one_s_entry(target: Decoder, saved: Path) -> None:
    save_head("medusa", {"heads.0.linear.bias": torch.zeros(64)}, torch.arange(5), CONFIG, (4,), {}, saved)
    card = read_card(saved)
    assert set(card) == {"draft", "medusa"} and card["draft"]["steps"] == 7
    assert load_head("medusa", target, saved).layers == (4,)
    assert json.loads((saved / "card.json").read_text()) == card
    describe_head("medusa", {"acceptance": {"code": 0.5}}, saved)
    assert read_card(saved) == {**card, "medusa": {**card["medusa"], "acceptance": {"code": 0.5}}}
    with pytest.raises(ValueError, match="knows no head 'mtp'"):
        describe_head("mtp", {}, saved)


def test_the_draft_model_says_what_its_decoder_says_of_frequent_tokens(target: Decoder, saved: Path) -> None:
    head = load_head("draft", target, saved)
    model = DraftModel(head, 12)
    assert isinstance(model, CachedModel) and (model.capacity, model.vocab_size) == (12, 97)
    embeddings = {"model.embed_tokens.weight": target.weights["model.embed_tokens.weight"]}
    own = {name: weight for name, weight in head.weights.items() if name.startswith("model.")}
    decoder = Decoder(head.config, {**own, **embeddings})
    text = [5, 90, 33, 7, 0, 96]
    whole = decoder(torch.tensor([text]), torch.arange(6), full_attention)[0]
    model.append([5, 90, 1, 2])
    model.truncate(2)
    logits = torch.cat([model.append([33, 7]), model.append([0]), model.append([96])])
    torch.testing.assert_close(logits[:, ::2], whole[2:, ::2], atol=1e-4, rtol=1e-4)
    assert bool((logits[:, 1::2] == -torch.inf).all())
    for tokens, words in (([], "tokens"), ([97], "token"), ([1] * 7, "capacity")):
        with pytest.raises(ValueError, match=words):
            model.append(tokens)
    for length in (-1, 7, True):
        with pytest.raises(ValueError, match="length"):
            model.truncate(length)
    assert model.length == 6


def test_the_workbook_s_own_heads_fit_its_model() -> None:
    try:
        decoder = load_decoder("smollm2")
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
    for name in HEADS:
        head = load_head(name, decoder)
        assert all(bool(weight.isfinite().all()) for weight in head.weights.values()), name
        assert head.card["bytes"] == head_file(name).stat().st_size
