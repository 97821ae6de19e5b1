"""The parts of a regex, as a tree: what a parser makes of a pattern and an automaton is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from labkit.checks import check_count

MAX_CODE_POINT = 0x10FFFF

CodePointRange: TypeAlias = tuple[int, int]
"""First and last code point, both included."""


@dataclass(frozen=True)
class CharacterClass:
    """One character out of a set, such as `a`, `[a-z_]`, `[^"]` or `.`.

    Args:
        ranges: the characters of the set, in any order; ranges may overlap.

    Raises:
        ValueError: there is none, or one that isn't (first, last) with 0 <= first <= last <= 0x10FFFF.
    """

    ranges: tuple[CodePointRange, ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("a character class needs at least one range of code points, got none")
        for first, last in self.ranges:
            if not 0 <= first <= last <= MAX_CODE_POINT:
                raise ValueError(f"a range of code points runs upwards within 0 to 0x10FFFF, got {first} to {last}")


@dataclass(frozen=True)
class Concatenation:
    """One part behind the other.

    Args:
        parts: in order; none at all is the empty text.
    """

    parts: tuple[RegexTree, ...]


@dataclass(frozen=True)
class Alternation:
    """One of several options.

    Args:
        options: at least one, in any order: which of them matched makes no difference.

    Raises:
        ValueError: there is no option.
    """

    options: tuple[RegexTree, ...]

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError("an alternation needs at least one option, got none")


@dataclass(frozen=True)
class Repetition:
    """A part several times.

    Args:
        part: what is repeated.
        least: how often at least.
        most: how often at most; None for any number.

    Raises:
        ValueError: a number is no int of at least 0, or `most` is below `least`.
    """

    part: RegexTree
    least: int
    most: int | None

    def __post_init__(self) -> None:
        check_count("least", self.least, 0)
        if self.most is not None:
            check_count("most", self.most, self.least)


RegexTree: TypeAlias = CharacterClass | Concatenation | Alternation | Repetition
