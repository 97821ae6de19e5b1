"""What a request asks of the engine, besides its prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import labkit.sampling_params as labkit_params
from labkit.checks import check_count

MAX_LOGPROBS = 20
MAX_SAMPLES = 64


@dataclass(frozen=True)
class SamplingParams(labkit_params.SamplingParams):
    """Lab 07's settings of the draw, and when to stop, what to penalise and what to report.

    Args:
        max_tokens: the most tokens to generate, at least 1.
        n: samples of the same prompt; sample i draws with seed `seed + i`.
        stop: texts that end the answer; the answer ends before them.
        stop_token_ids: token ids that end the answer, besides the model's own; they are not part of it.
        ignore_eos: whether to write on past the model's end-of-text tokens.
        presence_penalty: taken from the logit of each token that the answer holds already, -2 to 2.
        frequency_penalty: taken as often as the answer holds the token, -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer, 0.01 to 100.
        logit_bias: pairs (token id, number to add to its logit, -100 to 100).
        logprobs: report each token's log-probability and those of so many most likely ones; None for no report.

    Raises:
        ValueError: a setting is outside its range.

    Source: the OpenAI completions API for names and ranges; Keskar et al. 2019 (1909.05858) for the repetition
    penalty; module section 2.7.
    """

    max_tokens: int = 128
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_tokens", self.max_tokens, 1)
        check_count("n", self.n, 1)
        if self.n > MAX_SAMPLES:
            raise ValueError(f"n must be at most {MAX_SAMPLES}, got {self.n}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be a tuple of texts that are not empty, got {self.stop!r}")
        for token in self.stop_token_ids:
            check_count("each of stop_token_ids", token, 0)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (math.isfinite(value) and -2 <= value <= 2):
                raise ValueError(f"{name} must be a number from -2 to 2, got {value}")
        # Within these bounds no logit gets infinite.
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(f"repetition_penalty must be a number from 0.01 to 100, got {self.repetition_penalty}")
        for token, bias in self.logit_bias:
            check_count("each token of logit_bias", token, 0)
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias of token {token} must be a number from -100 to 100, got {bias}")
        if self.logprobs is not None:
            check_count("logprobs", self.logprobs, 0)
            if self.logprobs > MAX_LOGPROBS:
                raise ValueError(f"logprobs must be at most {MAX_LOGPROBS}, got {self.logprobs}")

    @property
    def changes_logits(self) -> bool:
        """Whether logits depend on more than the model."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )
