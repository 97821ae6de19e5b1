"""Small models to quantize, whose every width 32 divides and no two of whose sizes are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from labkit.config import ModelConfig
from labkit.decoder import Decoder, random_weights
from solutions.quantization.calibration import Calibration
from solutions.quantization.exporting import Origin
from solutions.quantization.methods import Settings
from solutions.quantization.pipeline import quantize_model
from solutions.quantization.quantized_model import QuantizedModel

CONFIG = ModelConfig.tiny(
    vocab_size=200, hidden_size=96, intermediate_size=160, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16
)
TOKENS = torch.randint(0, CONFIG.vocab_size, (3, 40), generator=torch.Generator().manual_seed(5))


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    config = ModelConfig.tiny(**{**CONFIG.__dict__, **changes})
    return Decoder(config, random_weights(config, seed))


def calibration(tokens: torch.Tensor = TOKENS) -> Calibration:
    return Calibration("random tokens", tokens)


def quantized(method: str, **settings: Any) -> QuantizedModel:
    return quantize_model(decoder(), method, Settings(**{"group_size": 32} | settings), calibration())


def origin(source: Path, method: str = "rtn", gguf: Path | None = None, **settings: Any) -> Origin:
    return Origin(source, gguf, method, Settings(**{"group_size": 32} | settings), "random tokens")
