"""Regexes judged by Python's own `re`, and automata and masks by looking at every state, token and byte.

Nothing here compiles a regex: a tree is written out as a pattern for `re`, and texts are tried one by one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from labkit.byte_automaton import DEAD, ByteAutomaton
from labkit.regex_tree import (
    Alternation,
    CharacterClass,
    CodePointRange,
    Concatenation,
    RegexTree,
    Repetition,
)

ALPHABET = "ab1_ \n-é€😀"
"""Characters of one to four bytes, in and out of the common classes."""


def pattern_of(tree: RegexTree) -> str:
    """A tree as a pattern of `re`."""
    if isinstance(tree, CharacterClass):
        return "[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in tree.ranges) + "]"
    if isinstance(tree, Concatenation):
        return "".join(pattern_of(part) for part in tree.parts)
    if isinstance(tree, Alternation):
        return "(?:" + "|".join(pattern_of(option) for option in tree.options) + ")"
    if isinstance(tree, Repetition):
        return f"(?:{pattern_of(tree.part)}){{{tree.least},{'' if tree.most is None else tree.most}}}"
    raise AssertionError(f"a tree holds {tree!r}; its nodes are those of labkit.regex_tree")


def texts(alphabet: str = ALPHABET, longest: int = 3) -> Iterator[str]:
    """All texts over an alphabet, the empty one first."""
    for length in range(longest + 1):
        yield from map("".join, product(alphabet, repeat=length))


def matches(pattern: str, text: str) -> bool:
    """What `re` says, where classes such as \\d are those of ASCII."""
    return re.fullmatch(pattern, text, re.ASCII) is not None


def characters(*ranges: str | CodePointRange) -> CharacterClass:
    """A class of characters; a string of one stands for itself, one of two for a range."""
    return CharacterClass(tuple((ord(r[0]), ord(r[-1])) if isinstance(r, str) else r for r in ranges))


def text_tree(text: str) -> Concatenation:
    """The tree of a plain text."""
    return Concatenation(tuple(characters(char) for char in text))


def random_tree(draw: random.Random, depth: int = 3) -> RegexTree:
    """A tree with few texts of great variety: one to four bytes a character, classes, options, repeats."""
    kind = draw.choice(["class", "class", "both", "either", "repeat"]) if depth else "class"
    if kind == "class":
        wide = characters((0, 0x60), (0x62, 0x10FFFF)), characters((0, 9), (11, 0x10FFFF))
        few = characters(draw.choice(ALPHABET)), characters("ab"), characters("é€", "1"), characters("_", "€😀")
        return draw.choice([*few, *wide])
    if kind == "repeat":
        least = draw.randrange(3)
        return Repetition(random_tree(draw, depth - 1), least, draw.choice([None, least, least + 1, least + 2]))
    children = tuple(random_tree(draw, depth - 1) for _ in range(draw.randrange(2, 4)))
    return Concatenation(children) if kind == "both" else Alternation(children)


class Reader:
    """An automaton, quick to run on many texts.

    Args:
        automaton: what was built.
    """

    def __init__(self, automaton: object) -> None:
        if not isinstance(automaton, ByteAutomaton):
            raise AssertionError(f"build_automaton must return a ByteAutomaton, got {automaton!r}")
        self._rows: list[list[int]] = automaton.next_state.tolist()
        self.accepting: list[bool] = automaton.accepting.tolist()

    def run(self, data: bytes, state: int = 0) -> int:
        """The state after some bytes, or `DEAD`."""
        for byte in data:
            if state == DEAD:
                break
            state = self._rows[state][byte]
        return state

    def accepts(self, data: bytes) -> bool:
        """Whether the bytes are a text of the language."""
        state = self.run(data)
        return state != DEAD and self.accepting[state]

    def states_after(self, states: Iterable[int]) -> set[int]:
        """The states, and all that can be reached from them."""
        found = set(states)
        waiting = list(found)
        while waiting:
            new = set(self._rows[waiting.pop()]) - found - {DEAD}
            found |= new
            waiting += new
        return found

    def useless_states(self) -> list[int]:
        """States that can't be reached, or from which nothing can be completed."""
        reachable = self.states_after([0])
        goals = {state for state, accepts in enumerate(self.accepting) if accepts}
        useful = {state for state in reachable if self.states_after([state]) & goals}
        return [state for state in range(len(self._rows)) if state not in useful]

    def next_states(self, vocabulary: Sequence[bytes | None], state: int) -> list[int]:
        """Where each token leads, token by token and byte by byte; `DEAD` for what is no text."""
        return [self.run(token, state) if token else DEAD for token in vocabulary]


def check_reads(what: str, reader: Reader, pattern: str, tried: Iterable[str]) -> None:
    """Fail unless an automaton accepts exactly those of the texts that `re` matches.

    Raises:
        AssertionError: naming the first text on which the two differ.
    """
    for text in tried:
        data = text.encode()
        right = matches(pattern, text)
        got = reader.accepts(data)
        if got != right:
            raise AssertionError(f"{what}: the automaton {'accepts' if got else 'refuses'} {text!r}; re says {right}")
