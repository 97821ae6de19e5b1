"""A table from n-grams to the latest place behind them."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.drafting import Draft


class NgramDrafter:
    """Builds its table anew for each text."""

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        for name, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if max_ngram < min_ngram:
            raise ValueError(f"no length lies between {min_ngram} and {max_ngram}")
        self._lengths = range(min_ngram, max_ngram + 1)

    def propose(self, tokens: Sequence[int], max_drafts: int, uniforms: Sequence[float] = ()) -> Draft:
        """Later entries overwrite earlier ones, so the latest place stays."""
        if type(max_drafts) is not int or max_drafts < 0:
            raise ValueError(f"max_drafts must be a whole number of at least 0, got {max_drafts!r}")
        text = tuple(tokens)
        behind = {
            text[end - n : end]: end for n in self._lengths for end in range(n, len(text))
        }
        found = [behind[text[-n:]] for n in self._lengths if n <= len(text) and text[-n:] in behind]
        return Draft(text[found[-1] : found[-1] + max_drafts] if found else ())
