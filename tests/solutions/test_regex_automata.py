"""Compiled regexes against Python's `re`, over generated patterns and the texts that hypothesis finds for them."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader.judge.regexes import Reader
from labkit.byte_automaton import DEAD
from solutions.kv_cache.automaton import compile_regex
from solutions.kv_cache.token_mask import TokenConstraint, TokenMasks
from solutions.kv_cache.token_trie import TokenTrie

CHARACTERS = st.sampled_from([
    *"ab-é€😀", ".", r"\d", r"\w", r"\S", r"\.", r"\u00ff",
    "[a-c]", "[^a]", "[^é-€]", r"[\d_-]", r"[^\w\n]", r"[\]\\x]",
])
REPEATS = st.sampled_from(["*", "+", "?", "{0}", "{2}", "{1,}", "{0,2}", "{2,3}"])


def patterns() -> st.SearchStrategy[str]:
    """Patterns of the subset, each a part that a repeat can follow."""
    return st.recursive(
        CHARACTERS,
        lambda parts: st.one_of(
            st.lists(parts, max_size=3).map(lambda row: f"({''.join(row)})"),
            st.lists(parts, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
            st.tuples(parts, REPEATS).map(lambda pair: f"({pair[0]}{pair[1]})"),
        ),
        max_leaves=6,
    )


@given(st.data(), patterns(), st.lists(st.text("ab1_-. \né€ÿ😀", max_size=5), max_size=20))
@settings(max_examples=120, deadline=None)
def test_automata_accept_what_re_matches(data: st.DataObject, pattern: str, others: list[str]) -> None:
    reader = Reader(compile_regex(pattern))
    assert not reader.useless_states()
    found = data.draw(st.lists(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True), min_size=1, max_size=3))
    for text in [*found, *others]:
        whole = text.encode()
        assert reader.accepts(whole) == bool(re.fullmatch(pattern, text, re.ASCII)), text
    for text in found:
        whole = text.encode()
        assert all(reader.run(whole[:length]) != DEAD for length in range(len(whole) + 1))


@given(patterns(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_walk_over_tokens_ends_in_a_match(pattern: str, draw: random.Random) -> None:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"ab", b"\xc3\xa9a", b"\x82\xac", b"aa", None]
    stop = len(vocabulary) - 1
    constraint = TokenConstraint(TokenMasks(TokenTrie(vocabulary), compile_regex(pattern), [stop]))
    data, length = b"", 0
    while True:
        allowed = constraint.mask().nonzero()[:, 0].tolist()
        # Open repeats end as soon as they may once the text is long.
        token = stop if length > 20 and stop in allowed else draw.choice(allowed)
        constraint.advance(token)
        if token == stop:
            break
        data += vocabulary[token] or b""
        length += 1
    assert re.fullmatch(pattern, data.decode(), re.ASCII)


@pytest.mark.parametrize("pattern", [
    "(a?){9000}", "(((a{999}){999}){999}){999}", "(){10000}", "((){9999}){9999}", "a{10000}", "(a|b)*a(a|b){40}",
    "[^a]{9000}", "(a*){0,9999}b",
])
def test_hostile_patterns_end_soon(pattern: str) -> None:
    try:
        assert compile_regex(pattern).num_states <= 10_001
    except ValueError as error:
        assert str(error)
