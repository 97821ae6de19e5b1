"""The judge of regexes: its patterns mean what the trees mean, and it sees what is wrong with an automaton."""

from __future__ import annotations

import random

import pytest
import torch

from grader.judge.regexes import (
    Reader,
    characters,
    check_reads,
    matches,
    pattern_of,
    random_tree,
    text_tree,
    texts,
)
from labkit.byte_automaton import DEAD, ByteAutomaton
from labkit.regex_tree import Alternation, Concatenation, Repetition


def automaton(*edges: tuple[int, str, int], states: int, accepting: int) -> ByteAutomaton:
    table = torch.full((states, 256), DEAD)
    for start, char, goal in edges:
        table[start, ord(char)] = goal
    return ByteAutomaton(table, torch.arange(states) == accepting)


AB = automaton((0, "a", 1), (1, "b", 2), states=3, accepting=2)


def test_trees_are_written_as_patterns_that_mean_the_same() -> None:
    tree = Concatenation((
        Alternation((text_tree("a."), characters("é€"))),
        Repetition(text_tree("b]"), 1, 2),
        Repetition(characters("\\"), 0, None),
    ))
    right = {"a.b]", "a.b]b]", "éb]", "€b]b]", "êb]", "a.b]\\\\\\", "éb]\\"}
    wrong = {"", "a.", "axb]", "b]", "a.b]b]b]", "a.éb]", "a.bb]", "ab]"}
    assert {text for text in right | wrong if matches(pattern_of(tree), text)} == right
    assert [text for text in texts("ab", 2) if matches(pattern_of(Concatenation(())), text)] == [""]
    with pytest.raises(AssertionError, match="its nodes are those of labkit"):
        pattern_of(Concatenation(("a",)))  # type: ignore[arg-type]


def test_random_trees_are_patterns_of_many_kinds() -> None:
    written = {pattern_of(random_tree(random.Random(seed))) for seed in range(200)}
    assert len(written) > 100
    found = [sum(matches(pattern, text) for text in texts("a1é", 3)) for pattern in written]
    assert sum(count > 0 for count in found) > 60 and sum(count == 0 for count in found) > 5


def test_a_reader_runs_and_counts_like_the_automaton() -> None:
    reader = Reader(AB)
    for data in (b"", b"a", b"ab", b"abb", b"b"):
        assert (reader.run(data), reader.accepts(data)) == (AB.run(data), AB.accepts(data))
    assert reader.next_states([b"a", b"ab", b"b", None, b""], 0) == [1, 2, DEAD, DEAD, DEAD]
    with pytest.raises(AssertionError, match="must return a ByteAutomaton, got 5"):
        Reader(5)


def test_states_that_are_of_no_use_are_found() -> None:
    assert Reader(AB).useless_states() == []
    dead = automaton((0, "a", 1), (0, "x", 3), (1, "b", 2), (3, "x", 3), states=4, accepting=2)
    lonely = automaton((0, "a", 1), (1, "b", 2), (3, "b", 2), states=4, accepting=2)
    assert Reader(dead).useless_states() == [3] and Reader(lonely).useless_states() == [3]


def test_the_first_difference_from_re_is_told() -> None:
    check_reads("ab", Reader(AB), "ab", texts("ab", 3))
    with pytest.raises(AssertionError, match=r"this: the automaton accepts 'ab'; re says False"):
        check_reads("this", Reader(AB), "a", ["", "ab"])
    with pytest.raises(AssertionError, match=r"this: the automaton refuses 'a'; re says True"):
        check_reads("this", Reader(AB), "ab|a", texts("ab", 3))
