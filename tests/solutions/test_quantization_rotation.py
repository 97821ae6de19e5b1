"""Rotations on the real model: the same logits, fewer outliers, and a smaller error in four bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from labkit.checkpoints import CheckpointError, bundled_folder, load
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention
from labkit.linear_inputs import linear_inputs
from labkit.texts import documents
from solutions.quantization.hadamard import hadamard_transform, random_rotation
from solutions.quantization.learned_rotation import learn_rotation, rotation_loss
from solutions.quantization.rotation import (
    OnlineHadamard,
    fold_gains,
    outlier_ratio,
    rotate_gated,
    rotate_heads,
    rotate_residual,
)

TOKENS = 96


class Sliced:
    """Some first blocks of the bundled model, with a vocabulary of the tokens of one text.

    Args:
        blocks: how many.
    """

    def __init__(self, blocks: int) -> None:
        model = load("smollm2")
        text = next(iter(documents("prose", "evaluation").values()))
        used, ids = torch.tensor(model.tokenizer.encode(text)[:TOKENS]).unique(return_inverse=True)
        self.tokens = ids[None]
        self.config: ModelConfig = replace(model.decoder.config, vocab_size=len(used), num_layers=blocks)
        self.weights: dict[str, Tensor] = {}
        for name, weight in model.decoder.weights.items():
            if not name.startswith("model.layers.") or int(name.split(".")[2]) < blocks:
                self.weights[name] = weight[used] if weight.shape[0] == model.decoder.config.vocab_size else weight

    def logits(self, decoder: Decoder) -> Tensor:
        """What a decoder says to the text."""
        return decoder(self.tokens, torch.arange(TOKENS), full_attention)


def rotated(model: Sliced) -> OnlineHadamard:
    """The model as QuaRot turns it: 576 = 16 · 36, 64 = 2^6 and 1536 = 128 · 12."""
    config, weights = fold_gains(model.config, model.weights)
    weights = rotate_residual(config, weights, random_rotation(576, 1))
    weights = rotate_heads(config, weights, random_rotation(64, 2))
    return OnlineHadamard(config, rotate_gated(config, weights))


@pytest.fixture(scope="module")
def model() -> Sliced:
    """Three blocks: enough for the outliers of the stream."""
    try:
        bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
    return Sliced(3)


def check_same_logits(model: Sliced, turned: Decoder) -> None:
    """Rotated and plain model err alike, compared with float64."""
    right = model.logits(Decoder(model.config, model.weights, torch.float64))
    plain = model.logits(Decoder(model.config, model.weights))
    # The rotation of the weights is rounded to float32 once more: as many roundings as a product of 576 terms has.
    scale = 576**0.5 * float(right.abs().max())
    check_close("the rotated model", model.logits(turned), right, scale=scale, dtype=torch.float32, plain=plain)


def four_bits(values: Tensor) -> Tensor:
    """Each row on its own symmetric grid."""
    scale = values.abs().amax(-1, keepdim=True) / 7
    return (values / scale).round() * scale


def error_of_four_bits(inputs: Tensor, weight: Tensor) -> float:
    """The relative error of a layer's output in W4A4."""
    right = inputs @ weight.T
    return float((four_bits(inputs) @ four_bits(weight).T - right).norm() / right.norm())


def test_the_real_model_stays_the_same_and_loses_its_outliers(model: Sliced) -> None:
    plain, turned = Decoder(model.config, model.weights), rotated(model)
    check_same_logits(model, turned)
    before, after = linear_inputs(plain, model.tokens), linear_inputs(turned, model.tokens)
    errors: list[list[float]] = [[], []]
    for name, inputs in before.items():
        read = hadamard_transform(after[name]) if name.endswith("down_proj") else after[name]
        ratios = float(outlier_ratio(inputs).mean()), float(outlier_ratio(read).mean())
        assert ratios[1] < 0.75 * ratios[0] and ratios[1] < 5, (
            f"{name}: outlier ratio {ratios[0]:.1f} -> {ratios[1]:.1f}"
        )
        for errors_of, decoder, x in ((errors[0], plain, inputs), (errors[1], turned, read)):
            errors_of.append(error_of_four_bits(x, decoder.weights[f"{name}.weight"]))
    assert sum(errors[1]) < 0.75 * sum(errors[0]), f"W4A4 errs by {errors[0]} before and by {errors[1]} after"


def test_a_learned_rotation_helps_a_real_layer(model: Sliced) -> None:
    read = linear_inputs(Decoder(model.config, model.weights), model.tokens)
    name = "model.layers.1.self_attn.v_proj"
    # A head's width of channels, those with the largest values among them.
    channels = read[name].abs().amax(0).argsort(descending=True)[:64]
    inputs, weights = read[name][:, channels], [model.weights[f"{name}.weight"][:, channels]]
    start = random_rotation(64, 3)
    learned = learn_rotation(weights, inputs[: TOKENS // 2], start)
    for part in (inputs[: TOKENS // 2], inputs[TOKENS // 2 :]):
        losses = [float(rotation_loss(weights, part, rotation, 4)) for rotation in (torch.eye(64), start, learned)]
        assert losses[2] < 0.9 * losses[1], f"without, with Hadamard, learned: {losses}"


@pytest.mark.evidence
def test_all_blocks_give_the_same_logits(model: Sliced) -> None:
    whole = Sliced(30)
    check_same_logits(whole, rotated(whole))
