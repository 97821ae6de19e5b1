"""The engine: what the labs built, serving many requests at once."""

from __future__ import annotations

from solutions.student_code import use_from_environment

# Before the engine imports what it is made of: whose lab code that is can't be changed later.
PARTS = use_from_environment()

from .engine import Engine, EngineConfig  # noqa: E402
from .request import Completion  # noqa: E402
from .sampling_params import SamplingParams  # noqa: E402

__all__ = ["PARTS", "Completion", "Engine", "EngineConfig", "SamplingParams"]
