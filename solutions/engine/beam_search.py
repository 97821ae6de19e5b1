"""Beam search: follow the likeliest texts, and return the best of those that end.

Beams are requests like any other. A step gives each of them logits, after which it rests; once all have theirs, those
whose texts go on well are forked, and the others take the forks over. So beams share the blocks of what they have in
common and copy the one in which they begin to differ, and a beam that was preempted only lets the others wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from labkit.checks import check_count

from .request import FinishReason, Request
from .sampling_params import MAX_SAMPLES


@dataclass(frozen=True)
class BeamSearchParams:
    """What a search looks for.

    Args:
        beam_width: texts that are followed at once, 1 to 64.
        max_tokens: the most tokens of an answer, at least 1.
        length_penalty: exponent of the length in an answer's score; above 0 it favours long answers.
        early_stopping: True ends the search once `beam_width` texts have ended; False when the best text that goes on,
            by the score of its present length, is no better than the worst of those; "never" when it can't become so.
        num_answers: how many of the best to return, at most `beam_width`.
        stop_token_ids: token ids that end a text, besides the model's own; they are not part of the answer.
        ignore_eos: whether to write on past the model's end-of-text tokens.

    Raises:
        ValueError: a setting is outside its range.

    Source: names and meaning are those of transformers' `generate`.
    """

    beam_width: int = 4
    max_tokens: int = 128
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_answers: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "num_answers"):
            check_count(name, getattr(self, name), 1)
        for name, most in (("beam_width", MAX_SAMPLES), ("num_answers", self.beam_width)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be a finite number, got {self.length_penalty}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")
        for token in self.stop_token_ids:
            check_count("each of stop_token_ids", token, 0)


@dataclass(frozen=True)
class Hypothesis:
    """A text that has ended, or that was followed when the search was broken off.

    Args:
        score: sum of its tokens' log-probabilities over the number of tokens to the power of `length_penalty`. The
            token that stopped it counts in both.
        tokens: the answer, without what stopped it.
        reason: why it ended.
    """

    score: float
    tokens: tuple[int, ...]
    reason: FinishReason


@dataclass(frozen=True)
class Branch:
    """How a beam goes on: with the text of a beam, maybe its own, and one token more."""

    beam: Request
    parent: Request
    token: int


@dataclass(frozen=True)
class _Candidate:
    """A text with a token more, and the sum of its log-probabilities."""

    total: float
    parent: Request
    token: int


class BeamSearch:
    """Follows the best texts of one prompt.

    Args:
        params: what it looks for.
        beams: as many requests as `beam_width`; the first holds the prompt, the others take over forks.
        stop_ids: tokens that end a text.
    """

    def __init__(self, params: BeamSearchParams, beams: Sequence[Request], stop_ids: Collection[int]) -> None:
        self.params = params
        self.beams = tuple(beams)
        self._stop_ids = frozenset(stop_ids)
        # So many are looked at that `beam_width` are left even if every beam's best tokens are those that end it.
        self._num_candidates = max(2, 1 + len(self._stop_ids)) * params.beam_width
        # Sums of log-probabilities, best first.
        self._totals: dict[Request, float] = {self.beams[0]: 0.0}
        self._offers: dict[Request, list[_Candidate]] = {}
        self._ended: list[Hypothesis] = []

    @property
    def is_due(self) -> bool:
        """Whether every text that is followed knows how it could go on."""
        return 0 < len(self._totals) == len(self._offers)

    @property
    def is_done(self) -> bool:
        """Whether no text is followed any more."""
        return not self._totals

    def offer(self, beam: Request, logits: Tensor) -> None:
        """Takes in how a text could go on.

        Args:
            beam: whose text it is.
            logits: after its newest token, `[vocab_size]`.
        """
        logprobs = logits.double().log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(self._num_candidates, len(logprobs)))
        self._offers[beam] = [
            _Candidate(self._totals[beam] + value, beam, token)
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True)
        ]

    def decide(self) -> list[Branch]:
        """Chooses among all offers; none is left afterwards.

        Returns:
            For every text that is followed from now on, who writes it; nothing when the search is done. A beam that
            takes over another's text is parent of none.
        """
        offers = [candidate for beam in self._totals for candidate in self._offers.pop(beam)]
        best = sorted(offers, key=lambda one: -one.total)[: self._num_candidates]
        length = self.beams[0].num_output + 1
        reasons = [self._reason(candidate.token, length) for candidate in best]
        followed = [one for one, reason in zip(best, reasons, strict=True) if reason is None][: self.params.beam_width]
        # What ends a text at a worse place than the first `beam_width` does not end it: better texts were at hand.
        for candidate, reason in list(zip(best, reasons, strict=True))[: self.params.beam_width]:
            if reason is not None:
                self._end(candidate, length, reason)
        self._ended = sorted(self._ended, key=lambda one: -one.score)[: self.params.beam_width]
        if not followed or self._is_settled(followed[0].total, length):
            self._totals = {}
            return []
        return self._seat(followed)

    def answers(self) -> list[Hypothesis]:
        """The best texts that have ended, as many as are wanted; those still followed stand in for missing ones."""
        followed = [
            Hypothesis(self._score(total, max(1, beam.num_output)), tuple(beam.output), FinishReason.ABORT)
            for beam, total in self._totals.items()
        ]
        return [*self._ended, *followed][: self.params.num_answers]

    def _reason(self, token: int, length: int) -> FinishReason | None:
        if token in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length == self.params.max_tokens else None

    def _end(self, candidate: _Candidate, length: int, reason: FinishReason) -> None:
        """A text ends with its newest token."""
        tail = () if reason is FinishReason.STOP else (candidate.token,)
        tokens = (*candidate.parent.output, *tail)
        self._ended.append(Hypothesis(self._score(candidate.total, length), tokens, reason))

    def _is_settled(self, best: float, length: int) -> bool:
        """Whether the texts that have ended are the answer, the best of the others having this sum."""
        if len(self._ended) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.params.max_tokens  # a sum below 0 is divided by as much as it can be
        return self._score(best, length) <= self._ended[-1].score

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self.params.length_penalty)

    def _seat(self, followed: list[_Candidate]) -> list[Branch]:
        """A beam goes on with its own text where it can; others take the places of those whose texts are given up."""
        parents = {candidate.parent for candidate in followed}
        free = [beam for beam in self.beams if beam not in parents]
        stayed: set[Request] = set()
        branches = []
        self._totals = {}
        for candidate in followed:
            stays = candidate.parent not in stayed
            beam = candidate.parent if stays else free.pop(0)
            stayed.add(candidate.parent)
            branches.append(Branch(beam, candidate.parent, candidate.token))
            self._totals[beam] = candidate.total
        return branches
