"""The first layers of a decoder are a decoder of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import full_attention
from labkit.early_exit import early_exit
from labkit.specs import TinyLlama


def test_it_computes_the_first_layers_with_the_very_weights() -> None:
    decoder = TinyLlama(ModelConfig.tiny(), seed=1).build()
    short = early_exit(decoder, 2)
    seen: dict[int, Tensor] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        seen[layer] = q
        return full_attention(layer, q, k, v, positions)

    tokens, positions = torch.tensor([[3, 1, 4, 1, 5]]), torch.arange(5)
    decoder(tokens, positions, attend)
    whole, seen = seen, {}
    assert short(tokens, positions, attend).shape == (1, 5, decoder.config.vocab_size)
    assert list(seen) == [0, 1] and all(torch.equal(seen[layer], whole[layer]) for layer in seen)
    shared = (short.weights[name].data_ptr() == decoder.weights[name].data_ptr() for name in short.weights)
    assert all(shared), "the weights are shared, not copied"


def test_all_layers_are_the_decoder_itself() -> None:
    decoder = TinyLlama(ModelConfig.tiny(), seed=1).build()
    tokens, positions = torch.tensor([[3, 1, 4]]), torch.arange(3)
    same = early_exit(decoder, decoder.config.num_layers)(tokens, positions, full_attention)
    assert torch.equal(same, decoder(tokens, positions, full_attention))


@pytest.mark.parametrize("layers", [0, 5, -1, 1.0])
def test_layers_that_are_not_there_are_refused(layers: int) -> None:
    with pytest.raises(ValueError, match="layers"):
        early_exit(TinyLlama(ModelConfig.tiny(), seed=1).build(), layers)
