"""Recording what linear layers read: against hooks in transformers, and with weights replaced on the way."""

from __future__ import annotations

import pytest
import torch

from grader.judge.numerics import check_close
from labkit.config import ModelConfig
from labkit.decoder import Decoder, random_weights
from labkit.linear_inputs import LayerWalk, block_linears, linear_inputs, linear_names
from labkit.transformers_model import build_transformers_model

CONFIG = ModelConfig.tiny(num_layers=2)
TOKENS = torch.tensor([[3, 60, 0, 17, 9], [5, 5, 8, 1, 44]])


def decoder(seed: int = 3) -> Decoder:
    return Decoder(CONFIG, random_weights(CONFIG, seed))


def test_every_linear_layer_of_the_blocks_is_recorded_with_a_row_for_each_token() -> None:
    found = linear_inputs(decoder(), TOKENS)
    assert tuple(found) == linear_names(CONFIG)
    for name, inputs in found.items():
        assert inputs.shape == (TOKENS.numel(), decoder().weights[f"{name}.weight"].shape[1]), name


def test_recorded_inputs_are_those_of_transformers_linear_layers() -> None:
    model = decoder()
    oracle = build_transformers_model(CONFIG, model.weights, torch.float64)
    seen: dict[str, torch.Tensor] = {}
    for name, module in oracle.named_modules():
        if name in linear_names(CONFIG):
            module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
    with torch.no_grad():
        oracle(TOKENS)
    for name, inputs in linear_inputs(model, TOKENS).items():
        expected = seen[name].flatten(0, 1)
        check_close(name, inputs, expected, scale=20 * float(expected.abs().max()), dtype=torch.float32)


def test_layers_that_read_the_same_share_one_tensor() -> None:
    found = linear_inputs(decoder(), TOKENS)
    q, k, v, o, gate, up, _ = (found[name] for name in block_linears(0))
    assert q is k and k is v and gate is up and o is not q


def test_blocks_behind_see_what_a_replaced_weight_gives() -> None:
    model, plain = decoder(), linear_inputs(decoder(), TOKENS)
    walk = LayerWalk(model, TOKENS)
    model.weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(CONFIG.hidden_size, CONFIG.intermediate_size)
    walk.advance()
    behind = walk.inputs()
    assert not torch.equal(behind[block_linears(1)[0]], plain[block_linears(1)[0]])
    assert "linear" not in vars(model), "the decoder is left as it was"


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    LayerWalk(decoder(), TOKENS)
    with pytest.raises(ValueError, match="token ids must lie in"):
        LayerWalk(decoder(), torch.tensor([[61]]))
