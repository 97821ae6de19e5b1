"""What an evaluation hands out: an interval, and questions with choices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """An estimate and the range that the data leave open.

    Args:
        estimate: of all data.
        low: lower end of the interval.
        high: upper end.
    """

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval says that there is a difference at all."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class ChoiceQuestion:
    """A text and several ways to go on, of which one is right.

    Args:
        context: token ids of the text.
        choices: token ids of each continuation.
        answer: index of the right one.

    Raises:
        ValueError: fewer than two choices, an empty context or choice, or an answer that is none of them.
    """

    context: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: int

    def __post_init__(self) -> None:
        if not self.context or len(self.choices) < 2 or not all(self.choices):
            raise ValueError(
                f"a question needs a context and at least two choices, none of them empty; got {len(self.context)} "
                f"tokens of context and choices of {[len(choice) for choice in self.choices]} tokens"
            )
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer must be the index of one of {len(self.choices)} choices, got {self.answer!r}")
