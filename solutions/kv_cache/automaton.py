"""Task 13c: the tree becomes a deterministic automaton over bytes."""

from __future__ import annotations

# BEGIN SOLUTION
from itertools import pairwise

# END SOLUTION
import torch

from labkit.byte_automaton import DEAD, ByteAutomaton
from labkit.checks import check_count
from labkit.regex_tree import Alternation, CharacterClass, Concatenation, RegexTree, Repetition

from .regex import parse_regex
from .utf8 import utf8_sequences

MAX_PARTS = 100_000
"""States of the nondeterministic automaton at which a tree is refused: repeats of repeats multiply."""

MAX_MEMBERS = 1_000_000
"""Members of all its subsets together at which a tree is refused: a state can stand for thousands of others."""


def compile_regex(pattern: str, max_states: int = 10_000) -> ByteAutomaton:
    """`parse_regex`, then `build_automaton`; arguments and errors as there."""
    return build_automaton(parse_regex(pattern), max_states)


def build_automaton(tree: RegexTree, max_states: int = 10_000) -> ByteAutomaton:
    """Build the automaton that reads exactly the UTF-8 encodings of a tree's texts.

    Args:
        tree: from `parse_regex`, or built by hand.
        max_states: the most states that the automaton may get. A short regex can need very many: to tell whether
            the tenth character from the end is an `a`, a reader must remember ten characters.

    Returns:
        An automaton without dead states: each state can be reached from the start, and from each an accepting one
        can be reached. So after some bytes the state is `DEAD` if and only if nothing can make a text of them.

    Raises:
        ValueError: the automaton would have more than `max_states` states, or there is no text at all that UTF-8 can
            write; or `max_states` is no int of at least 1. A tree that is far too large is refused before time and
            memory are spent on it.

    Source: Thompson 1968 (nondeterministic automaton); Rabin and Scott 1959 (subset construction).
    """
    check_count("max_states", max_states, 1)
    # BEGIN SOLUTION
    nfa = _Nfa()
    goal = nfa.add(tree, nfa.start)
    rows, accepting = _determinise(nfa, goal, max_states)
    live = _live_states(rows, accepting)
    if 0 not in live:
        raise ValueError("the regex matches no text that UTF-8 can write; surrogates have no encoding")
    # The start stays state 0, since it is the first that lives.
    number = {state: index for index, state in enumerate(live)}
    next_state = torch.full((len(live), 256), DEAD)
    for state in live:
        for first, last, target in rows[state]:
            next_state[number[state], first : last + 1] = number.get(target, DEAD)
    return ByteAutomaton(next_state, torch.tensor([accepting[state] for state in live]))
    # END SOLUTION


# BEGIN SOLUTION
Edge = tuple[int, int, int]
"""First byte, last byte, state that they lead to."""


class _Nfa:
    """States with edges that read a byte, and silent ones that read nothing."""

    start = 0

    def __init__(self) -> None:
        self.edges: list[list[Edge]] = []
        self.silent: list[list[int]] = []
        self.new_state()

    def new_state(self) -> int:
        """One more state."""
        if len(self.edges) >= MAX_PARTS:
            raise ValueError(f"the regex has more than {MAX_PARTS} parts; repeat less, or split it")
        self.edges.append([])
        self.silent.append([])
        return len(self.edges) - 1

    def add(self, tree: RegexTree, start: int) -> int:
        """Lets a tree's texts lead from `start` to a state, which is returned."""
        if isinstance(tree, CharacterClass):
            return self._add_class(tree, start)
        if isinstance(tree, Concatenation):
            for part in tree.parts:
                start = self.add(part, start)
            return start
        end = self.new_state()
        if isinstance(tree, Alternation):
            for option in tree.options:
                self.silent[self.add(option, start)].append(end)
            return end
        return self._add_repetition(tree, start, end)

    def _behind(self, start: int) -> int:
        """A fresh state that `start` leads to in silence."""
        state = self.new_state()
        self.silent[start].append(state)
        return state

    def _add_class(self, tree: CharacterClass, start: int) -> int:
        end = self.new_state()
        for first, last in tree.ranges:
            for sequence in utf8_sequences(first, last):
                state = start
                for low, high in sequence[:-1]:
                    following = self.new_state()
                    self.edges[state].append((low, high, following))
                    state = following
                self.edges[state].append((*sequence[-1], end))
        return end

    def _add_repetition(self, tree: Repetition, start: int, end: int) -> int:
        # Each copy takes a state at least, so that repeats of nothing count towards the limit too.
        for _ in range(tree.least):
            start = self.add(tree.part, self._behind(start))
        if tree.most is None:
            # The loop must not come back to `start`, where other options may begin.
            loop = self._behind(start)
            self.silent[self.add(tree.part, loop)].append(loop)
            start = loop
        else:
            for _ in range(tree.most - tree.least):
                self.silent[start].append(end)
                start = self.add(tree.part, self._behind(start))
        self.silent[start].append(end)
        return end

    def closure(self, states: set[int]) -> frozenset[int]:
        """The states and all that are reached from them in silence."""
        found, waiting = set(states), list(states)
        while waiting:
            for state in self.silent[waiting.pop()]:
                if state not in found:
                    found.add(state)
                    waiting.append(state)
        return frozenset(found)


def _determinise(nfa: _Nfa, goal: int, max_states: int) -> tuple[list[list[Edge]], list[bool]]:
    """Subset construction: one state for each set of states that the nondeterministic automaton can be in at once.

    Returns:
        The edges of each state, and whether it accepts. The empty set is no state: there no edge is made.
    """
    subsets = [nfa.closure({nfa.start})]
    numbers = {subsets[0]: 0}
    rows: list[list[Edge]] = []
    members = 0
    for subset in subsets:
        members += len(subset)
        if members > MAX_MEMBERS:
            raise ValueError("the regex takes too much work to compile; use fewer optional parts in a row")
        row = []
        edges = [edge for state in subset for edge in nfa.edges[state]]
        # Between two cuts all bytes lead to the same states, so one look for each piece is enough.
        cuts = sorted({cut for first, last, _ in edges for cut in (first, last + 1)})
        for first, after in pairwise(cuts):
            targets = {target for low, high, target in edges if low <= first <= high}
            if not targets:
                continue
            reached = nfa.closure(targets)
            if reached not in numbers:
                if len(subsets) == max_states:
                    raise ValueError(f"the automaton has more than {max_states} states; simplify the regex")
                numbers[reached] = len(subsets)
                subsets.append(reached)
            row.append((first, after - 1, numbers[reached]))
        rows.append(row)
    return rows, [goal in subset for subset in subsets]


def _live_states(rows: list[list[Edge]], accepting: list[bool]) -> list[int]:
    """The states from which an accepting one can be reached, in rising order."""
    sources: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for _, _, target in row:
            sources[target].append(state)
    live = {state for state, accepts in enumerate(accepting) if accepts}
    waiting = list(live)
    while waiting:
        new = set(sources[waiting.pop()]) - live
        live |= new
        waiting += new
    return sorted(live)


# END SOLUTION
