"""What someone asks of a model: a prompt, and where to stop."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.checks import check_count, check_tokens


@dataclass(frozen=True)
class GenerationRequest:
    """One request among many.

    Args:
        prompt: token ids to start with, at least one.
        max_new_tokens: the most tokens to generate, at least 1.
        stop_tokens: ids that end the generation; the one that did is part of the output.
        arrival: the first step in which the request may run; 0 is there from the start.

    Raises:
        ValueError: a value outside these limits.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: tuple[int, ...] = ()
    arrival: int = 0

    def __post_init__(self) -> None:
        check_tokens("prompt", self.prompt)
        check_count("max_new_tokens", self.max_new_tokens, 1)
        check_count("arrival", self.arrival, 0)
