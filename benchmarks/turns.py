"""Contenders in turns: each begins when the threads of the one before are at rest."""

from __future__ import annotations

import time

_SECONDS = 1.0
"""Idle threads spin for a while before they sleep: right behind transformers, which had given its answer, the engine
took a fourth more for a token."""


def rest() -> None:
    """Waits before a contender's turn, outside of what is timed."""
    time.sleep(_SECONDS)
