"""Task 9: how often drafts are kept, measured so that the formula of task 5 may be fed with it."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.checks import check_count
from labkit.drafting import Round

from .speedup import expected_tokens


def acceptance_estimate(rounds: Sequence[Round]) -> float:
    """The alpha of the formula: the chance that a draft is kept, once all before it were.

    A draft behind a rejected one was never judged. Counting it as rejected, as kept / drafted does, makes alpha the
    smaller the more drafts a round has. Judged are the kept ones, and the one that a round was ended by.

    Args:
        rounds: of one or many texts; those without drafts say nothing.

    Returns:
        kept / (kept + rejected), from 0 to 1.

    Raises:
        ValueError: no draft was judged.
    """
    # BEGIN SOLUTION
    kept = sum(round_.accepted for round_ in rounds)
    rejected = sum(_was_rejected(round_) for round_ in rounds)
    if kept + rejected == 0:
        raise ValueError("no draft was judged in these rounds, so there is nothing to estimate")
    return kept / (kept + rejected)
    # END SOLUTION


def acceptance_by_place(rounds: Sequence[Round], num_places: int) -> list[float | None]:
    """The same for each place of a round. A flat row supports the formula; often it falls, since errors add up.

    Args:
        rounds: as for `acceptance_estimate`.
        num_places: how many places to look at, at least 1.

    Returns:
        For each place the share of drafts judged there that were kept; None if none was.

    Raises:
        ValueError: `num_places` is no int of at least 1.
    """
    check_count("num_places", num_places, 1)
    # BEGIN SOLUTION
    shares: list[float | None] = []
    for place in range(num_places):
        kept = sum(round_.accepted > place for round_ in rounds)
        rejected = sum(round_.accepted == place and _was_rejected(round_) for round_ in rounds)
        shares.append(kept / (kept + rejected) if kept + rejected else None)
    return shares
    # END SOLUTION


def tokens_per_round(rounds: Sequence[Round]) -> float:
    """Tokens that a pass of the target gave on average.

    Raises:
        ValueError: there are no rounds.
    """
    if not rounds:
        raise ValueError("there are no rounds to average over")
    # BEGIN SOLUTION
    return sum(round_.emitted for round_ in rounds) / len(rounds)
    # END SOLUTION


def predicted_tokens_per_round(rounds: Sequence[Round]) -> float:
    """What the formula of task 5 makes of the estimated alpha, for rounds with just these numbers of drafts.

    Raises:
        ValueError: no draft was judged.
    """
    # BEGIN SOLUTION
    alpha = acceptance_estimate(rounds)
    return sum(expected_tokens(alpha, round_.drafted) for round_ in rounds) / len(rounds)
    # END SOLUTION


# BEGIN SOLUTION
def _was_rejected(round_: Round) -> bool:
    """Whether a draft of this round was judged and not kept; a text that ended on a kept draft rejected nothing."""
    return round_.accepted < round_.drafted and round_.emitted > round_.accepted


# END SOLUTION
