"""Questions made of text that every machine has."""

from __future__ import annotations

from collections import Counter

import pytest

from labkit.choice_tasks import code_questions, retrieval_questions
from labkit.texts import documents
from solutions.quantization.retrieval import hide_fact


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [ord(character) for character in text]


def decode(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


def test_every_fact_stands_in_its_text_once_and_the_others_too() -> None:
    questions = retrieval_questions(encode, hide_fact, 9, 4000, seed=3)
    places = []
    for question in questions:
        text = decode(question.context)
        assert len(text) == 4000
        asked = text.rsplit("The code of ", 1)[1].removesuffix(" is")
        right = decode(question.choices[question.answer])
        assert text.count(f"The code of {asked} is{right}.") == 1
        for choice in question.choices:
            assert text.count(f"is{decode(choice)}.") == 1, "every number is somebody's"
        places.append(text.index(f"The code of {asked} is{right}.") / 4000)
    assert places[0] < 0.02 and places[-1] > 0.9 and places == sorted(places), "depths go evenly from front to end"


def test_the_next_line_is_the_module_s_own() -> None:
    questions = code_questions(encode, 12, 6, seed=4)
    modules = list(documents("code", "evaluation").values())
    for question in questions:
        right = decode(question.context) + decode(question.choices[question.answer])
        (module,) = [text for text in modules if right in text]
        lines = [decode(choice).rstrip("\n") for choice in question.choices]
        assert len(set(lines)) == 4 and all(line in module.splitlines() for line in lines)
        assert len({len(line) - len(line.lstrip()) for line in lines}) == 1, "indentation gives nothing away"


def test_answers_stand_at_every_place_and_seeds_repeat_them() -> None:
    first = code_questions(encode, 40, 3, seed=1)
    assert first == code_questions(encode, 40, 3, seed=1) != code_questions(encode, 40, 3, seed=2)
    counts = Counter(question.answer for question in first)
    assert set(counts) == {0, 1, 2, 3} and max(counts.values()) < 25


def test_counts_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        code_questions(encode, 0, 3, seed=1)
    with pytest.raises(ValueError, match="num_choices"):
        retrieval_questions(encode, hide_fact, 3, 4000, seed=1, num_choices=9)
    with pytest.raises(ValueError, match="length"):
        retrieval_questions(encode, hide_fact, 3, 40, seed=1)
