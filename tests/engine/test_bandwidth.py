"""How near decoding comes to its bound is told from bytes that are counted by hand, and from nothing unknown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from labkit.checkpoints import load_tokenizer
from labkit.config import ModelConfig
from labkit.decoder import random_weights
from labkit.probing import machine_bounds
from solutions.engine import Engine, EngineConfig
from solutions.engine.__main__ import app
from solutions.engine.bandwidth import decode_speed
from solutions.engine.models.llama import Llama
from solutions.engine.models.loading import LoadedModel
from tests.engine.families import WINDOW
from tests.engine.test_models import GetFamily, get_family  # noqa: F401


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_all_weights_and_the_text(tied: bool) -> None:
    config = ModelConfig.tiny(tie_embeddings=tied, num_layers=3)
    model = Llama(config, random_weights(config, seed=1), torch.bfloat16)
    engine = Engine(LoadedModel(model, load_tokenizer("smollm2")), EngineConfig(kv_dtype="fp32", num_blocks=4))
    hidden, width, q = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * width + 2 * hidden
    # Tied or not, one matrix of the size of the vocabulary is read: the output projection.
    weights = 2 * (3 * layer + hidden + config.vocab_size * hidden)
    assert [engine.decode_bytes(length) for length in (0, 10)] == [weights, weights + 10 * 4 * 2 * 3 * kv]


def test_layers_with_a_window_read_no_more_than_it(get_family: GetFamily) -> None:  # noqa: F811
    family = "qwen3, windows in every other layer"
    engine = Engine(LoadedModel(get_family(family).model, load_tokenizer("smollm2")), EngineConfig(num_blocks=4))
    none, few, many = (engine.decode_bytes(length) for length in (0, WINDOW, WINDOW + 10))
    a_token = 2 * 2 * 8 * 4  # in one layer
    assert none is not None and few is not None and many is not None
    assert few - none == 3 * WINDOW * a_token and many - few == 10 * a_token


def test_nobody_guesses_what_codes_and_experts_take(get_family: GetFamily, tiny_model: Any) -> None:  # noqa: F811
    mixture = LoadedModel(get_family("mixtral").model, load_tokenizer("smollm2"))
    for engine in (Engine(mixture), Engine(tiny_model, EngineConfig(weights="int8"))):
        assert engine.decode_bytes(1) is None and decode_speed(engine, 2, 2) is None


def test_the_share_is_of_the_bandwidth(make_engine: Any) -> None:
    bounds = machine_bounds("cpu", quick=True)
    engine = make_engine()
    speed = decode_speed(engine, 6, 4)
    assert speed is not None and speed.num_bytes == engine.decode_bytes(6 + 2)
    assert speed.share == pytest.approx(speed.num_bytes / (bounds.read * speed.seconds))
    engine.check_idle()


def test_the_command_refuses_a_device_that_is_not_there() -> None:
    refused = CliRunner().invoke(app, ["generate", "Once", "--device", "tpu"])
    assert refused.exit_code == 2 and "one of cpu, cuda or None, got 'tpu'" in refused.output
