"""Keeps every round and weighs them anew each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from labkit.drafting import Draft, Drafter

from .speedup import expected_tokens


def best_num_drafts_under_load(acceptance: float, draft_cost: float, verify_costs: Sequence[float]) -> int:
    """Sorts all numbers of drafts by their time per token."""
    if not _is_number(acceptance, 0, 1) or not _is_number(draft_cost, 0):
        raise ValueError(f"acceptance {acceptance!r} or draft_cost {draft_cost!r} is out of range")
    if not verify_costs or not all(_is_number(cost, 0) and cost > 0 for cost in verify_costs):
        raise ValueError(f"costs must be numbers above 0, got {verify_costs!r}")
    # Rounded, so that a last digit makes no difference between equals.
    times = [
        (round((k * draft_cost + cost) / expected_tokens(acceptance, k), 12), k) for k, cost in enumerate(verify_costs)
    ]
    return sorted(times)[0][1]


class AdaptiveDrafter:
    """Learns from the text at the next call, like the reference, but by lists."""

    def __init__(
        self,
        drafter: Drafter,
        verify_costs: Callable[[], Sequence[float]],
        draft_cost: float,
        acceptance: float = 0.5,
        decay: float = 0.9,
        probe_every: int = 16,
    ) -> None:
        if not all(_is_number(share, 0, 1) for share in (acceptance, decay)) or not _is_number(draft_cost, 0):
            raise ValueError("acceptance and decay lie from 0 to 1, draft_cost is at least 0")
        if type(probe_every) is not int or probe_every < 1:
            raise ValueError(f"probe_every must be a whole number of at least 1, got {probe_every!r}")
        self._ask, self._costs, self._price = drafter.propose, verify_costs, draft_cost
        self._decay, self._patience, self._waiting = decay, probe_every, probe_every
        self._history: list[tuple[float, float]] = [(acceptance, 1)]
        self._pending: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def acceptance(self) -> float:
        """A weighted sum over all rounds."""
        weights = [self._decay**age for age in reversed(range(len(self._history)))]
        kept, judged = (
            sum(weight * round_[part] for weight, round_ in zip(weights, self._history, strict=True)) for part in (0, 1)
        )
        return float(kept / judged)

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float]) -> Draft:
        """Counts down to the next probe."""
        text = tuple(tokens)
        if not text or type(max_drafts) is not int or max_drafts < 0 or len(uniforms) < max_drafts:
            raise ValueError("a text, a number of drafts and a uniform for each of them are needed")
        costs = list(self._costs())
        best_num_drafts_under_load(0, 0, costs)
        before, drafts = self._pending
        new = text[len(before) :]
        if text[: len(before)] == before:
            shown = min(len(new), len(drafts))
            kept = next((i for i in range(shown) if new[i] != drafts[i]), shown)
            if shown:
                self._history.append((kept, min(kept + 1, shown)))
        room = costs[: max_drafts + 1]
        wanted = best_num_drafts_under_load(self.acceptance, self._price, room)
        if wanted:
            self._waiting = self._patience
        elif len(room) > 1:
            self._waiting -= 1
            if self._waiting == 0:
                wanted, self._waiting = 1, self._patience
        draft = Draft(())
        if wanted:
            draft = self._ask(list(text), wanted, list(uniforms)[:wanted])
        self._pending = (text, tuple(draft.tokens))
        return draft


def _is_number(value: object, least: float, most: float = float("inf")) -> bool:
    """A finite number within limits."""
    return type(value) in (int, float) and isfinite(value) and least <= value <= most  # type: ignore[arg-type]
