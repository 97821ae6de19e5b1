"""The engine: what the labs built, serving many requests at once."""

from __future__ import annotations

from .engine import Engine, EngineConfig
from .request import Completion
from .sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams"]
