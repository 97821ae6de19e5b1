"""Drafts for requests that decode, and which of them their text keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.drafting import Draft, Drafter
from solutions.speculative.drafts import draft_probs, usable_drafts, widen
from solutions.speculative.rounds import ACCEPT, DRAFT, OWN, place_uniform
from solutions.speculative.verification import verify

from .request import Request

MakeDrafter = Callable[[], Drafter]


@dataclass(frozen=True)
class SpeculationConfig:
    """How the engine speculates.

    Args:
        make_drafter: makes a drafter for one request; it may remember the request's text.
        num_drafts: the most drafts of a request in one step.
    """

    make_drafter: MakeDrafter
    num_drafts: int = 4


class Speculator:
    """Asks each request's drafter, and judges what came of it.

    A drafter without chance (`Draft.probs` is None) is judged by comparison: each place is drawn as if nothing had been
    drafted, with that place's own random number, and drafts are kept as long as they are what was drawn. The text is
    then the very text of plain decoding, at any temperature. A drafter that draws its tokens from q is judged by the
    rule of lab 14, which keeps the distribution and more of the drafts, but not the very token of a seed.

    Args:
        config: who drafts, and how much.
        vocab_size: of the target.
    """

    def __init__(self, config: SpeculationConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._drafters: dict[Request, Drafter] = {}
        self._drafts: dict[Request, Draft] = {}

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """The drafts that the target is to compute: all that it can read, up to `most`."""
        most = min(most, self._config.num_drafts)
        if request not in self._drafters:
            self._drafters[request] = self._config.make_drafter()
        place = request.num_output
        uniforms = [place_uniform(request.params, place + i, DRAFT) for i in range(most)]
        draft = self._drafters[request].propose(list(request.tokens), most, uniforms)
        count = usable_drafts(draft, most)
        # Behind the first token that the target can't read, it can read nothing.
        readable = next((i for i, one in enumerate(draft.tokens[:count]) if one >= self._vocab_size), count)
        probs = None if draft.probs is None else draft.probs[:readable]
        self._drafts[request] = Draft(draft.tokens[:readable], probs)
        return draft.tokens[:readable]

    def draws(self, request: Request) -> bool:
        """Whether the drafts of this step were drawn from a distribution."""
        return request in self._drafts and self._drafts[request].probs is not None

    def judge(self, request: Request, p: Tensor, drafts: Sequence[int]) -> list[int]:
        """Lab 14's rule for drafts that were drawn.

        Args:
            request: whose they are.
            p: the target's distributions after filters and masks, `[drafts + 1, vocab_size]`.
            drafts: those that the step has computed, maybe fewer than were proposed.

        Returns:
            The tokens that the text grows by.
        """
        q = draft_probs(self._drafts[request], len(drafts), p.shape[1])
        place = request.num_output
        uniforms = [
            [place_uniform(request.params, place + i, use) for use in (ACCEPT, OWN)] for i in range(len(drafts) + 1)
        ]
        tokens, kept = verify(
            widen(p, q.shape[1])[None],
            q[None],
            torch.tensor([list(drafts)], dtype=torch.int64),
            torch.tensor([uniforms], dtype=torch.float64),
        )
        return [int(token) for token in tokens[0, : int(kept) + 1]]

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._drafters.pop(request, None)
        self._drafts.pop(request, None)


def accept_matching(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """What a text grows by, if place i of plain decoding would draw `drawn[i]` after the first i drafts.

    Args:
        drawn: one token more than there are drafts.
        drafts: what was guessed.
    """
    kept = 0
    while kept < len(drafts) and drawn[kept] == drafts[kept]:
        kept += 1
    return list(drawn[: kept + 1])
