"""The types that a regex passes through: trees and automata refuse what they can't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from labkit.byte_automaton import DEAD, ByteAutomaton
from labkit.checkpoints import CheckpointError, load_tokenizer
from labkit.codec import Decoder, Encoder
from labkit.regex_tree import Alternation, CharacterClass, Concatenation, Repetition
from labkit.specs import VocabularyBytes

A = CharacterClass(((97, 97),))


def two_states() -> ByteAutomaton:
    """Reads a+."""
    table = torch.full((2, 256), DEAD)
    table[:, ord("a")] = 1
    return ByteAutomaton(table, torch.tensor([False, True]))


def test_an_automaton_runs_over_bytes() -> None:
    automaton = two_states()
    assert automaton.num_states == 2
    assert [automaton.run(data) for data in (b"", b"a", b"aaa", b"b", b"ab", b"aba")] == [0, 1, 1, DEAD, DEAD, DEAD]
    assert automaton.run(b"a", 1) == 1
    assert [automaton.accepts(data) for data in (b"", b"a", b"aa", b"ab")] == [False, True, True, False]
    for state in (2, DEAD, True, "a"):
        with pytest.raises(ValueError, match=f"state must be an int from 0 to 1, got {state!r}"):
            automaton.run(b"a", state)  # type: ignore[arg-type]


def test_trees_and_automata_cross_as_they_are() -> None:
    tree = Alternation((Concatenation((A, Repetition(A, 2, None))), CharacterClass(((0, 9), (0x10FFFF, 0x10FFFF)))))
    encoder = Encoder()
    node = encoder.encode([tree, two_states()])
    message = encoder.message({})
    back, automaton = Decoder(message, snapshot=True).decode(node)
    assert back == tree
    assert torch.equal(automaton.next_state, two_states().next_state) and automaton.accepts(b"aa")


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: CharacterClass(()), "at least one range"),
    (lambda: CharacterClass(((98, 97),)), "runs upwards within 0 to 0x10FFFF, got 98 to 97"),
    (lambda: CharacterClass(((0, 0x110000),)), "got 0 to 1114112"),
    (lambda: CharacterClass(((-1, 5),)), "got -1 to 5"),
    (lambda: Alternation(()), "at least one option"),
    (lambda: Repetition(A, -1, None), "least must be an int of at least 0"),
    (lambda: Repetition(A, 3, 2), "most must be an int of at least 3, got 2"),
    (lambda: ByteAutomaton(torch.zeros(0, 256, dtype=torch.int64), torch.ones(0, dtype=torch.bool)), "num_states >= 1"),
    (lambda: ByteAutomaton(torch.zeros(1, 256, dtype=torch.int64), torch.zeros(1)), "accepting must be bool"),
    (lambda: ByteAutomaton(torch.zeros(1, 255, dtype=torch.int64), torch.ones(1, dtype=torch.bool)), r"\[1, 256\]"),
    (lambda: ByteAutomaton(torch.zeros(1, 256), torch.ones(1, dtype=torch.bool)), "next_state must be int64"),
    (lambda: ByteAutomaton(torch.full((1, 256), 1), torch.ones(1, dtype=torch.bool)), "hold -1 to 0, got 1 to 1"),
    (lambda: ByteAutomaton(torch.full((1, 256), -2), torch.ones(1, dtype=torch.bool)), "got -2 to -2"),
])
def test_what_can_not_be_is_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


def test_the_spec_of_a_vocabulary_is_built_from_the_tokenizer() -> None:
    try:
        tokenizer = load_tokenizer("smollm2")
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")
    assert VocabularyBytes("smollm2").build() == tokenizer.vocabulary_bytes()
