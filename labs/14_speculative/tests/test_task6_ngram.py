"""Task 6: what is looked for, which place wins, and where the copy ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from grader.judge.refusal import check_refused
from labkit.drafting import Draft
from labkit.specs import Markov

pytestmark = pytest.mark.task(6)


def propose(drafter: Any, text: list[int], max_drafts: int) -> list[int]:
    """The drafted tokens."""
    draft = drafter.propose(text, max_drafts, [0.5] * max_drafts)
    assert isinstance(draft, Draft), f"propose must return a Draft, got {draft!r}"
    assert draft.probs is None, "an n-gram drafter leaves nothing to chance: probs is None"
    return list(draft.tokens)


def check(lab: Any, limits: tuple[int, int], text: list[int], max_drafts: int, right: list[int], why: str) -> None:
    """One text, one draft."""
    got = propose(lab.NgramDrafter(*limits), text, max_drafts)
    assert got == right, f"{text} with n-grams of {limits[1]} to {limits[0]} drafts {got}, should draft {right}: {why}"


def test_what_followed_is_copied(lab: Any) -> None:
    text = [5, 6, 7, 8, 9, 1, 2, 5, 6]
    for most in (1, 2, 3, 4):
        check(lab, (3, 1), text, most, [7, 8, 9, 1][:most], "5 6 stood before, and 7 8 9 1 followed")
    check(lab, (3, 1), text, 0, [], "no draft was asked for")


def test_the_longest_match_wins(lab: Any) -> None:
    text = [1, 2, 3, 40, 9, 2, 3, 50, 9, 3, 60, 1, 2, 3]
    check(lab, (3, 1), text, 2, [40, 9], "1 2 3 is the longest match, although 2 3 and 3 stand nearer")
    check(lab, (2, 1), text, 2, [50, 9], "at most two tokens are compared, so 2 3 is the longest")
    check(lab, (1, 1), text, 2, [60, 1], "only the last token is compared")
    check(lab, (4, 1), text, 2, [40, 9], "no match of four, so three are tried next")


def test_of_equal_matches_the_latest_wins(lab: Any) -> None:
    check(lab, (2, 1), [1, 2, 30, 1, 2, 40, 1, 2, 50, 1, 2], 1, [50], "the newest text is the likeliest to go on")


def test_short_texts_have_no_match(lab: Any) -> None:
    check(lab, (2, 1), [4, 7, 4], 1, [7], "a text of three has one")
    for text in ([], [5], [5, 6], [1, 2, 3]):
        check(lab, (3, 1), text, 4, [], "nothing stood there before")
    check(lab, (5, 3), [1, 2, 1, 2], 4, [], "three tokens don't occur twice")


def test_a_draft_ends_where_the_text_ends(lab: Any) -> None:
    check(lab, (2, 1), [1, 2, 1, 2], 5, [1, 2], "only two tokens followed")
    check(lab, (3, 1), [1, 1, 1, 1], 5, [1], "the match of three overlaps its own repetition; one token followed")
    check(lab, (1, 1), [8, 8], 5, [8], "one token followed")


def test_limits_of_the_match_are_kept(lab: Any) -> None:
    text = [1, 2, 3, 9, 7, 3]
    check(lab, (3, 1), text, 2, [9, 7], "3 stood before")
    check(lab, (3, 2), text, 2, [], "7 3 didn't, and one token is too little")


def test_random_texts_match_a_plain_search(lab: Any) -> None:
    generator = random.Random(6)
    found = 0
    for _ in range(60):
        text = [generator.randrange(3) for _ in range(generator.randint(0, 24))]
        low = generator.randint(1, 3)
        high, most = generator.randint(low, 6), generator.randint(0, 5)
        right: list[int] = []
        for n in range(low, high + 1):  # a longer match overrides
            places = [i for i in range(len(text) - n) if text[i : i + n] == text[len(text) - n :]]
            if places:
                right = text[places[-1] + n :][:most]
        found += bool(right)
        check(lab, (high, low), text, most, right, "the latest place of the longest suffix")
    assert found > 20


def test_impossible_limits_are_refused(lab: Any) -> None:
    assert propose(lab.NgramDrafter(1, 1), [3, 4, 3], 1) == [4], "a good drafter copies 4"
    for limits in ((2, 3), (0, 0), (3, 0), (-1, 1), (2.0, 1), (True, 1)):
        check_refused(f"n-grams of {limits[1]} to {limits[0]}", lambda pair=limits: lab.NgramDrafter(*pair))
    check_refused("-1 drafts", lambda: lab.NgramDrafter(2, 1).propose([1, 2, 1], -1, []))


@pytest.mark.integration
def test_copying_speeds_up_your_own_loop(lab: Any) -> None:
    # A text that goes round: after one turn every draft is right.
    turn = tuple(tuple(1.0 if j == (i + 1) % 5 else 0.0 for j in range(5)) for i in range(5))
    result = lab.speculate(Markov(turn, 60), lab.NgramDrafter(3, 1), [0, 1, 2, 3, 4, 0, 1], 30)
    assert list(result.tokens) == [(2 + i) % 5 for i in range(30)], f"the text goes round, got {result.tokens}"
    assert len(result.rounds) <= 8, f"30 tokens in rounds of up to 5 take 6 to 8 rounds, took {len(result.rounds)}"
