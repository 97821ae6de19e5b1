"""A model of random weights with the real tokenizer, and transformers' answers for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.checkpoints import load_tokenizer
from labkit.checkpoints.loading import Model
from labkit.config import ModelConfig
from labkit.decoder import Decoder, random_weights
from labkit.transformers_model import build_transformers_model
from solutions.engine import Engine, EngineConfig
from solutions.engine.scheduler import SchedulerConfig

CONFIG = ModelConfig.tiny(vocab_size=49_152, num_layers=2)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_model() -> Model:
    """Two layers that were never trained, and the tokenizer of the bundled model."""
    return Model(Decoder(CONFIG, random_weights(CONFIG, seed=5)), load_tokenizer("smollm2"))


@pytest.fixture
def make_engine(tiny_model: Model) -> MakeEngine:
    """Engines on that model; settings of the scheduler and of the engine in one."""

    def make(**settings: Any) -> Engine:
        limits = {key: settings.pop(key) for key in list(settings) if key in SchedulerConfig.__dataclass_fields__}
        return Engine(tiny_model, EngineConfig(scheduler=SchedulerConfig(**limits), **settings))

    return make


@pytest.fixture(scope="session")
def oracle_logits(tiny_model: Model) -> Callable[[tuple[int, ...]], Tensor]:
    """transformers' logits after a text, float32 `[vocab_size]`."""
    oracle = build_transformers_model(CONFIG, tiny_model.decoder.weights, torch.float32)

    @cache
    def logits(tokens: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            result: Tensor = oracle(torch.tensor([tokens])).logits[0, -1]
        return result

    return logits
