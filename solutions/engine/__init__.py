"""The engine: what the labs built, serving many requests at once."""

from __future__ import annotations

import sys

from solutions.student_code import Part, fault_line, use_from_environment

PARTS: list[Part] = []
try:
    # Before the engine imports what it is made of: whose lab code that is can't be changed later.
    PARTS = use_from_environment()

    from .engine import Engine, EngineConfig
    from .request import Completion
    from .sampling_params import SamplingParams
except Exception as error:
    # `python -m` is about to run the command line, which has to end with a line.
    if sys.argv[0] != "-m" or not (PARTS or isinstance(error, ValueError)):
        raise
    print(f"error {fault_line(error, PARTS) if PARTS else error}", file=sys.stderr)
    raise SystemExit(2) from None

__all__ = ["PARTS", "Completion", "Engine", "EngineConfig", "SamplingParams"]
