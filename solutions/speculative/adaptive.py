"""Task 10: as many drafts as pay at present: k from the acceptance so far and from the costs under the present load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from labkit.checks import check_count, check_tokens
from labkit.drafting import Draft, Drafter

from .speedup import speedup

VerifyCosts = Callable[[], Sequence[float]]


def best_num_drafts_under_load(acceptance: float, draft_cost: float, verify_costs: Sequence[float]) -> int:
    """The k with the largest speed-up where a pass over k + 1 tokens costs what was measured.

    Args:
        acceptance: alpha, from 0 to 1.
        draft_cost: c, one draft step in the unit of `verify_costs`.
        verify_costs: v(0), v(1), ...: what a pass over k + 1 tokens of each sequence costs now, above 0, in any one
            unit. They need not rise evenly: a matrix tile that is full makes a step. Their number bounds k.

    Returns:
        From 0, which is no speculation, to `len(verify_costs) - 1`; of equally good ones the smallest.

    Raises:
        ValueError: `acceptance` outside 0 to 1, a negative `draft_cost`, or `verify_costs` without a number or with
            one that isn't finite and above 0.

    Source: module sections 3.2 and 3.3, with the measured v(k) in place of 1.
    """
    costs = _checked_costs(verify_costs)
    speedup(acceptance, 0, draft_cost)
    # BEGIN SOLUTION
    return max(range(len(costs)), key=lambda k: (speedup(acceptance, k, draft_cost, costs[k]), -k))
    # END SOLUTION


class AdaptiveDrafter:
    """Asks another drafter for as many drafts as pay at present, and for none where speculation does not pay.

    It is a drafter itself, so the loop needs no word about it. How many drafts were kept it reads off the text: what
    the target puts in place of a rejected draft is never that draft again, so the kept ones are those with which the
    text went on. Its choice depends on finished rounds alone, and in them on nothing that was dropped: the random
    numbers of dropped drafts are used again, and whoever chose by them would bias the text.

    Args:
        drafter: makes the drafts; one of its own for each request.
        verify_costs: called without arguments in each round, for the costs at the load of that moment; see
            `best_num_drafts_under_load`. Look them up by batch size in a measured table: a clock read in between
            would make the text depend on the time of day.
        draft_cost: c, one draft step in the unit of `verify_costs`.
        acceptance: what to believe of alpha before anything was judged; counts like one judged draft.
        decay: what an observation is still worth one observed round later, from 0 (only the last one counts) to 1
            (nothing is ever forgotten).
        probe_every: while no k pays, every so many rounds asks for one draft, to notice when times change.

    Raises:
        ValueError: `acceptance` or `decay` outside 0 to 1, a negative `draft_cost`, or `probe_every` no int of at
            least 1.
    """

    def __init__(
        self,
        drafter: Drafter,
        verify_costs: VerifyCosts,
        draft_cost: float,
        acceptance: float = 0.5,
        decay: float = 0.9,
        probe_every: int = 16,
    ) -> None:
        speedup(acceptance, 0, draft_cost)
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ValueError(f"decay must be a number from 0 to 1, got {decay!r}")
        check_count("probe_every", probe_every, 1)
        self._drafter = drafter
        self._verify_costs = verify_costs
        self._draft_cost = draft_cost
        self._decay = decay
        self._probe_every = probe_every
        self._kept = float(acceptance)
        self._judged = 1.0
        self._rounds_off = 0
        self._text: list[int] = []
        self._drafts: tuple[int, ...] = ()

    @property
    def acceptance(self) -> float:
        """The present estimate of alpha: kept by judged drafts, old ones counting less."""
        return self._kept / self._judged

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Look how the last drafts fared, choose k, and hand on what the drafter proposes.

        The last round counts if the text has gone on from where it was. Judged were the drafts that came true, and
        one more if the text went on differently; a draft behind a rejected one says nothing.

        Args:
            tokens: the text so far, at least one.
            max_drafts: the most tokens to draft, at least 0.
            uniforms: one number in [0, 1) for each draft; the drafter gets the first of them.

        Returns:
            The drafter's draft as it is; nothing, without asking the drafter, if k is 0.

        Raises:
            ValueError: an empty text, `max_drafts` no int of at least 0, too few uniforms, or costs that are none.
                Nothing has changed then.
        """
        text = check_tokens("tokens", tokens)
        check_count("max_drafts", max_drafts, 0)
        if len(uniforms) < max_drafts:
            raise ValueError(f"{max_drafts} drafts need as many uniforms, got {len(uniforms)}")
        costs = _checked_costs(self._verify_costs())
        # BEGIN SOLUTION
        self._observe(text)
        costs = costs[: max_drafts + 1]
        count = best_num_drafts_under_load(self.acceptance, self._draft_cost, costs)
        if count:
            self._rounds_off = 0
        elif len(costs) > 1:
            self._rounds_off += 1
            if self._rounds_off == self._probe_every:
                count, self._rounds_off = 1, 0
        draft = self._drafter.propose(text, count, list(uniforms[:count])) if count else Draft(())
        self._text, self._drafts = list(text), tuple(draft.tokens[:max_drafts])
        return draft
        # END SOLUTION

    # BEGIN SOLUTION
    def _observe(self, text: list[int]) -> None:
        """Learn from the last round, if this text shows how it ended."""
        before = len(self._text)
        if text[:before] != self._text:
            return
        kept = 0
        for draft, token in zip(self._drafts, text[before:], strict=False):
            if draft != token:
                break
            kept += 1
        # Without a token behind the kept ones nobody knows what became of the next draft.
        judged = kept + (kept < min(len(self._drafts), len(text) - before))
        if judged:
            self._kept = self._decay * self._kept + kept
            self._judged = self._decay * self._judged + judged

    # END SOLUTION


def _checked_costs(verify_costs: Sequence[float]) -> list[float]:
    """The costs as a list, if they are some."""
    costs = list(verify_costs)
    if not costs:
        raise ValueError("verify_costs must hold at least v(0), what a pass without drafts costs; got nothing")
    for k, cost in enumerate(costs):
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not math.isfinite(cost) or cost <= 0:
            raise ValueError(f"verify_costs[{k}] must be a finite number above 0, got {cost!r}")
    return costs
