"""Task 6: a drafter that costs nothing: look for the newest words earlier in the text and copy what followed."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.checks import check_count
from labkit.drafting import Draft


class NgramDrafter:
    """Prompt lookup: the longest suffix of the text that occurred before decides what is copied.

    Args:
        max_ngram: the longest suffix to look for.
        min_ngram: the shortest one worth trusting.

    Raises:
        ValueError: a length that is no int of at least 1, or `min_ngram` above `max_ngram`.

    Source: module section 3.4.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        check_count("min_ngram", min_ngram, 1)
        check_count("max_ngram", max_ngram, 1)
        if min_ngram > max_ngram:
            raise ValueError(f"min_ngram is {min_ngram}, but max_ngram only {max_ngram}; swap them")
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float] = ()) -> Draft:
        """Copy what followed an earlier occurrence of the text's last tokens.

        Longer suffixes go first. Of several occurrences the latest counts, and what it is followed by ends where the
        text ends; an occurrence that only the text's own end can continue is none.

        Args:
            tokens: the text so far.
            max_drafts: the most tokens to draft, at least 0.
            uniforms: not used, nothing is left to chance.

        Returns:
            Up to `max_drafts` tokens without probabilities; none if no suffix occurred before.

        Raises:
            ValueError: `max_drafts` is no int of at least 0.
        """
        check_count("max_drafts", max_drafts, 0)
        # BEGIN SOLUTION
        text = list(tokens)
        for length in range(min(self._max_ngram, len(text) - 1), self._min_ngram - 1, -1):
            suffix = text[-length:]
            for start in range(len(text) - length - 1, -1, -1):
                if text[start : start + length] == suffix:
                    follows = start + length
                    return Draft(tuple(text[follows : follows + max_drafts]))
        return Draft(())
        # END SOLUTION
