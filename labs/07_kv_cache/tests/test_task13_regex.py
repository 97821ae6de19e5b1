"""Task 13, first half: a regex becomes an automaton over bytes, judged by Python's `re` and by its UTF-8."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from grader.judge.refusal import check_refused
from grader.judge.regexes import (
    ALPHABET,
    Reader,
    characters,
    check_reads,
    matches,
    pattern_of,
    random_tree,
    text_tree,
    texts,
)
from labkit.byte_automaton import DEAD
from labkit.regex_tree import Alternation, Concatenation, RegexTree, Repetition

pytestmark = pytest.mark.task(13)

ANYTHING = Repetition(characters((0, 0x10FFFF)), 0, None)


def check_parsed(lab: Any, pattern: str, tried: list[str]) -> None:
    """The tree of a pattern stands for the texts that `re` matches."""
    tree = lab.parse_regex(pattern)
    written = pattern_of(tree)
    for text in tried:
        got, right = matches(written, text), matches(pattern, text)
        assert got == right, (
            f"the tree of {pattern!r} {'matches' if got else 'does not match'} {text!r}, by re it should be the other "
            f"way round; the tree is {tree}"
        )


OPTIONS = [
    "", "a", "ab", "a|b", "ab|ba", "|a", "a|", "a||b", "(a|b)b", "a(?:b|)1", "((a)(b))|1", "(ab|a)(b|)",
    "a|b1|", "(|a)b", "é€", "(😀|a€)b", r"\x61\u00e9", r"\U0001F600|\u20ac", r"\-\_|\n", "[a]b", ".", "..", "a.b",
]


def test_options_and_groups_are_read_as_by_re(lab: Any) -> None:
    for pattern in OPTIONS:
        check_parsed(lab, pattern, list(texts(longest=3)))


REPEATS = [
    "a*", "a+", "a?", "a{0}", "a{1}", "a{3}", "a{2,}", "a{0,}", "a{0,1}", "a{1,3}", "a{2,2}", "(ab){1,2}",
    "ab{2}", "a|b{2}", "(a*b){2}", "(a|b){2,3}", "(a{2}){1,2}", "[ab]{2}a?", "(a?){2}", "(a*)*", "(a+){0,2}b",
    "(|a)+",
]


def test_repeats_are_exact_at_both_ends(lab: Any) -> None:
    for pattern in REPEATS:
        check_parsed(lab, pattern, list(texts("ab", 6)))


CLASSES = [
    "[ab]", "[a-c]", "[^a]", "[^a-c]", "[a-]", "[-a]", "[^-a]", "[a^]", "[0-9a-f]", "[é-€]", "[^é]", "[^a-é€]",
    r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\d_]", r"[^\d_]", r"[\W]", r"[^\W]", r"[\S\n]", r"[\]\\]",
    r"[^\]\-\\]", r"[\x00-\x1f]", "[.*+?(){}|$]", r"[a\-c]", r"[^\x00-@b-\U0010ffff]", "[^c-eb-d]", "[^a-zb]",
    "[^a\u0080]",
]


def test_classes_hold_characters(lab: Any) -> None:
    singles = [chr(code) for code in (*range(0x180), 0x20AB, 0x20AC, 0x20AD, 0xFFFF, 0x1F600, 0x10FFFF)]
    for pattern in CLASSES:
        check_parsed(lab, pattern, [*singles, "", "aa", "é€"])


def test_the_complement_is_all_the_rest(lab: Any) -> None:
    last = 0x10FFFF
    for ranges, right in (
        (((97, 97),), ((0, 96), (98, last))),
        (((0, 9), (11, last)), ((10, 10),)),
        (((50, 60), (10, 20)), ((0, 9), (21, 49), (61, last))),
        (((10, 50), (20, 30)), ((0, 9), (51, last))),
        (((10, 30), (20, 50), (51, 60)), ((0, 9), (61, last))),
        (((0, last),), ()),
        ((), ((0, last),)),
        (((0, 5), (5, 5), (last, last)), ((6, last - 1),)),
    ):
        got = lab.complement(ranges)
        assert got == right, f"complement({ranges}) is {right}, got {got}"


REFUSED = {
    0: r"( ((a) ) [ [a- [^] *a ? {2} ^a \Aa (?=a)b (?<=a)b (?P<x>a) (?i)a (?>a) \q \x4 \u12g4 \U00110000",
    1: r"a(b a)b a[b a] b[] a[^\s\S] (+) a{} a{,3} a{x} a{1,x} a{-1} a{1;2} a{²} a{٣} a{99999999} a{1,10001} a} [b-a] "
       r"[\d-z] [a-\w] a$ a\b b(?!a) a(?<!b) a\p{L} a\ [\b] ",
    2: r"a|* a** a*? a+? a?? a*+ ab{ ab{3,2} [xb-a]",
    3: r"(a)) (a)\1",
    4: r"a{2}{3} a{2}?",
    51: "a" + "(" * 60 + ")" * 60,
}
"""By the position of what is at fault, patterns with a space between them."""


def test_what_is_not_in_the_subset_is_refused_at_its_place(lab: Any) -> None:
    tree = lab.parse_regex("(a|b){2}[^c]")
    assert matches(pattern_of(tree), "abé"), f"a good pattern comes first; its tree is {tree}"
    for position, patterns in REFUSED.items():
        for pattern in patterns.split():
            place = f"position {position} "
            check_refused(f"the pattern {pattern!r}", lambda p=pattern: lab.parse_regex(p), mentions=place)


def encodings(first: int, last: int) -> int:
    """How many code points of a range have an encoding."""
    surrogates = max(0, min(last, 0xDFFF) - max(first, 0xD800) + 1)
    return last - first + 1 - surrogates


EDGES = [
    0, 1, 0x41, 0x7F, 0x80, 0xBF, 0xC0, 0xE9, 0x7FF, 0x800, 0xFFF, 0x1000, 0x20AC, 0xD7FF, 0xD800, 0xDFFF,
    0xE000, 0xFFFF, 0x10000, 0x1F600, 0x3FFFF, 0x40000, 0xFFFFF, 0x100000, 0x10FFFF,
]


def test_sequences_cover_each_character_once(lab: Any) -> None:
    for first, last in product(EDGES, EDGES):
        if first > last:
            continue
        sequences = lab.utf8_sequences(first, last)
        assert isinstance(sequences, list), f"utf8_sequences must return a list, got {sequences!r}"
        where = f"of the sequences for U+{first:04X} to U+{last:04X}, {sequences},"
        # As many strings of bytes as characters; each character's bytes in one sequence, none beside the range.
        sizes = 0
        for sequence in sequences:
            size = 1
            for low, high in sequence:
                size *= high - low + 1
            sizes += size
        assert sizes == encodings(first, last), f"{where} {sizes} strings can be read, not {encodings(first, last)}"
        near = {edge + step for edge in (first, last) for step in (-65, -64, -1, 0, 1, 63, 64)} | {*EDGES}
        for code in near:
            if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                continue
            data = chr(code).encode()
            found = [
                sequence
                for sequence in sequences
                if len(sequence) == len(data)
                and all(low <= byte <= high for byte, (low, high) in zip(data, sequence, strict=True))
            ]
            wanted = int(first <= code <= last)
            assert len(found) == wanted, f"{where} {len(found)} match U+{code:04X} ({data.hex(' ')}), not {wanted}"


def test_nothing_but_utf8_is_ever_read(lab: Any) -> None:
    reader = Reader(lab.build_automaton(ANYTHING))
    leads = (0x00, 0x7F, 0x80, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEE, 0xEF, 0xF0, 0xF3, 0xF4, 0xF5, 0xFF)
    follow = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC2, 0xFF)
    tails = (0x7F, 0x80, 0xBF, 0xC0)
    strings = [bytes(pair) for pair in product(range(256), range(256))]
    strings += [bytes(four[:length]) for four in product(leads, follow, tails, tails) for length in (3, 4)]
    for data in strings:
        try:
            right = bool(data.decode() or True)
        except UnicodeDecodeError:
            right = False
        got = reader.accepts(data)
        assert got == right, (
            f"any text at all: bytes {data.hex(' ')} {'are' if right else 'are no'} UTF-8, but the automaton "
            f"{'accepts' if got else 'refuses'} them. Overlong forms, surrogates and lone bytes are no characters."
        )


def test_automata_read_what_re_matches(lab: Any) -> None:
    tried = [*texts(longest=2), *texts("ab€", 5)]
    trees: list[RegexTree] = [
        Concatenation(()),
        text_tree("é€"),
        characters((0, 0x60), (0x62, 0x10FFFF)),
        Repetition(Alternation((text_tree("ab"), text_tree("a"))), 1, 2),
        Repetition(Repetition(characters("a"), 0, None), 2, 2),
        Concatenation((Repetition(characters("a"), 0, 2), characters("b"))),
        Concatenation((Repetition(characters("a"), 0, None), Repetition(characters("b"), 0, None))),
        Concatenation((Alternation((Repetition(characters("a"), 0, None), text_tree("b€"))), characters("b"))),
        Repetition(Concatenation((Repetition(characters("a"), 0, 1), characters("b"))), 2, None),
        Alternation((Repetition(characters("a"), 1, None), Repetition(characters("b"), 2, None))),
        Repetition(Concatenation(()), 2, None),
        Alternation((Concatenation(()), text_tree("a"))),
    ]
    for tree in trees:
        check_reads(f"regex {pattern_of(tree)}", Reader(lab.build_automaton(tree)), pattern_of(tree), tried)
    for count in range(5):
        for more in (0, 1, 3, None):
            most = None if more is None else count + more
            tree = Repetition(characters("a€"), count, most)
            check_reads(
                f"a part repeated {count} to {most} times", Reader(lab.build_automaton(tree)), pattern_of(tree),
                ["a€a€a€a€a€"[:length] for length in range(10)],
            )


@pytest.mark.parametrize("seed", range(4))
def test_random_automata_read_what_re_matches(lab: Any, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        tree = random_tree(draw)
        reader = Reader(lab.build_automaton(tree))
        more = ["".join(draw.choices(ALPHABET, k=draw.randrange(3, 7))) for _ in range(60)]
        check_reads(f"regex {pattern_of(tree)}", reader, pattern_of(tree), [*texts(longest=2), *more])
        assert not reader.useless_states(), f"regex {pattern_of(tree)} has dead states {reader.useless_states()}"


def test_no_state_is_dead(lab: Any) -> None:
    surrogate, some = characters((0xD800, 0xDFFF)), characters((0xD7FF, 0xE000))
    for tree, pattern, dead, alive in (
        (Alternation((Concatenation((text_tree("ab"), surrogate)), text_tree("b"))), "b", "a", "b"),
        (Alternation((Concatenation((text_tree("é"), surrogate)), text_tree("è"))), "è", "é", "è"),
        (Concatenation((Repetition(Concatenation((text_tree("a"), surrogate)), 0, None), text_tree("b"))), "b", "a",
         "b"),
        (Concatenation((some, text_tree("b"))), "[\ud7ff\ue000]b", "b", "\ud7ff"),
    ):
        automaton = lab.build_automaton(tree)
        reader = Reader(automaton)
        check_reads(f"regex {pattern_of(tree)}", reader, pattern, [*texts("abé", 3), "è", "\ud7ffb", "\ue000b"])
        assert reader.run(dead.encode()) == DEAD, (
            f"regex {pattern_of(tree)}: after {dead!r} no text can be completed, since surrogates have no encoding; "
            "such a state must be DEAD"
        )
        assert reader.run(alive.encode()) != DEAD, f"regex {pattern_of(tree)}: {alive!r} is a good beginning"
        assert not reader.useless_states(), f"regex {pattern_of(tree)} has dead states {reader.useless_states()}"
    beginning = Reader(lab.build_automaton(characters("é")))
    assert beginning.run(b"\xc3") != DEAD, "the first byte of é is a good beginning"
    assert beginning.run(b"\xc2") == DEAD, "é doesn't begin with c2"


def test_a_regex_without_texts_is_refused(lab: Any) -> None:
    surrogate = characters((0xD800, 0xDFFF))
    assert Reader(lab.build_automaton(Repetition(surrogate, 0, 1))).accepts(b""), "the empty text is a text"
    assert Reader(lab.build_automaton(Alternation((surrogate, text_tree("a"))))).accepts(b"a"), "one option is left"
    for tree in (surrogate, Concatenation((text_tree("ab"), surrogate)), Repetition(surrogate, 1, None)):
        check_refused(f"{pattern_of(tree)!r}, which UTF-8 can't write,", lambda t=tree: lab.build_automaton(t))


def test_an_automaton_that_grows_too_large_is_refused(lab: Any) -> None:
    either = characters("ab")

    def from_the_end(count: int) -> RegexTree:
        return Concatenation((Repetition(either, 0, None), characters("a"), Repetition(either, count, count)))

    reader = Reader(lab.build_automaton(from_the_end(3), 40))
    assert reader.accepts(b"babab") and not reader.accepts(b"abbab"), "whether the fourth from the end is an a"
    assert Reader(lab.build_automaton(Repetition(either, 50, 50), 60)).accepts(b"ab" * 25), "51 states are enough"
    check_refused("50 characters in 40 states", lambda: lab.build_automaton(Repetition(either, 50, 50), 40))
    # A reader must remember 20 characters, which takes a million states.
    check_refused("a regex of a million states", lambda: lab.build_automaton(from_the_end(20), 500))
    huge = Repetition(Repetition(Repetition(either, 1000, 1000), 1000, 1000), 1000, 1000)
    check_refused("a billion characters", lambda: lab.build_automaton(huge))
    for wrong in (0, -1, True):
        check_refused(f"max_states={wrong}", lambda value=wrong: lab.build_automaton(either, value))
