"""Hidden states are those of transformers, and a layer alone computes what it computes in the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.decoder_layer import decoder_layer, rms_norm
from labkit.features import RecordingDecoder
from labkit.transformers_model import build_transformers_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
PLACES = torch.arange(5)


def tiny(**changes: object) -> Decoder:
    """A decoder in float64."""
    config = ModelConfig.tiny(**changes)
    return Decoder(config, random_weights(config, 7, torch.float64), torch.float64)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_hidden_states_are_those_of_transformers(architecture: str) -> None:
    decoder = tiny(architecture=architecture, tie_embeddings=False)
    states = list(decoder.hidden_states(TOKENS, PLACES, full_attention))
    model = build_transformers_model(decoder.config, decoder.weights, torch.float64)
    with torch.no_grad():
        theirs = model(TOKENS, output_hidden_states=True)
    assert len(states) == len(theirs.hidden_states) == decoder.config.num_layers + 1
    for number, (own, other) in enumerate(zip(states, theirs.hidden_states, strict=True)):
        # transformers norms and rotates in float32, whatever the dtype.
        check_close(f"hidden state {number}", own.float(), other, scale=100.0, dtype=torch.float32)
    assert torch.equal(decoder.head(states[-1]), decoder(TOKENS, PLACES, full_attention))


def test_chosen_layers_lie_side_by_side() -> None:
    decoder = tiny()
    states = list(decoder.hidden_states(TOKENS, PLACES, full_attention))
    for layers in ((4,), (0, 2, 4), (3, 1), (2, 2)):
        recorder = RecordingDecoder(decoder, layers)
        assert recorder.recorded.shape == (1, 0, recorder.width) and recorder.width == len(layers) * 24
        assert torch.equal(recorder(TOKENS, PLACES, full_attention), decoder(TOKENS, PLACES, full_attention))
        assert torch.equal(recorder.recorded, torch.cat([states[layer] for layer in layers], -1)), layers
    for bad in ((), (5,), (-1,), (True,), (1.0,)):
        with pytest.raises(ValueError, match="layers"):
            RecordingDecoder(decoder, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_layer_alone_is_the_model_s_layer(architecture: str) -> None:
    decoder = tiny(architecture=architecture)
    states = list(decoder.hidden_states(TOKENS, PLACES, full_attention))
    for layer in range(decoder.config.num_layers - 1):
        block = f"model.layers.{layer}."
        weights = {"layer." + n.removeprefix(block): w for n, w in decoder.weights.items() if n.startswith(block)}
        got = decoder_layer(decoder.config, weights, states[layer], PLACES, full_attention)
        assert torch.equal(got, states[layer + 1])
        # What attention reads may be given; then the layer's first norm is not looked at.
        read = rms_norm(states[layer], weights.pop("layer.input_layernorm.weight"), decoder.config.norm_eps)
        given = decoder_layer(decoder.config, weights, states[layer], PLACES, full_attention, read)
        assert torch.equal(given, states[layer + 1])


def test_gradients_reach_weights_and_inputs() -> None:
    decoder = tiny(num_layers=1)
    block = "model.layers.0."
    weights = {
        "layer." + n.removeprefix(block): w.clone().requires_grad_()
        for n, w in decoder.weights.items() if n.startswith(block)
    }  # fmt: skip
    hidden = torch.randn(1, 5, 24, dtype=torch.float64, requires_grad=True)
    decoder_layer(decoder.config, weights, hidden, PLACES, full_attention).square().sum().backward()
    gradients: dict[str, Tensor | None] = {name: w.grad for name, w in weights.items()} | {"hidden": hidden.grad}
    for name, gradient in gradients.items():
        assert gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.any()), name
