"""Each round as a list of verdicts, counted by place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from labkit.drafting import Round

from .speedup import expected_tokens


def _verdicts(round_: Round) -> Iterator[bool]:
    """True for each kept draft, then False for a rejected one if there was one."""
    yield from [True] * round_.accepted
    if round_.emitted == round_.accepted + 1 and round_.drafted != round_.accepted:
        yield False


def acceptance_estimate(rounds: Sequence[Round]) -> float:
    """The share of True among all verdicts."""
    counts = Counter(verdict for round_ in rounds for verdict in _verdicts(round_))
    if not counts:
        raise ValueError("these rounds judged no draft")
    return counts[True] / counts.total()


def acceptance_by_place(rounds: Sequence[Round], num_places: int) -> list[float | None]:
    """The share of True among the verdicts of each place."""
    if type(num_places) is not int or num_places < 1:
        raise ValueError(f"num_places must be a whole number of at least 1, got {num_places!r}")
    counts = Counter((place, verdict) for round_ in rounds for place, verdict in enumerate(_verdicts(round_)))
    totals = [counts[place, True] + counts[place, False] for place in range(num_places)]
    return [counts[place, True] / total if total else None for place, total in enumerate(totals)]


def tokens_per_round(rounds: Sequence[Round]) -> float:
    """The mean of what came out."""
    if len(rounds) == 0:
        raise ValueError("no rounds, no mean")
    return float(sum(round_.emitted for round_ in rounds)) / len(rounds)


def predicted_tokens_per_round(rounds: Sequence[Round]) -> float:
    """The formula for each number of drafts, weighted by how often it occurred."""
    alpha = acceptance_estimate(rounds)
    lengths = Counter(round_.drafted for round_ in rounds)
    return sum(times * expected_tokens(alpha, k) for k, times in lengths.items()) / lengths.total()
