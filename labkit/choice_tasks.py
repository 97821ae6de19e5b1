"""Questions for a language model, made of text that every machine has: facts in long texts, lines of code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from labkit.checks import check_count
from labkit.evaluation import ChoiceQuestion
from labkit.texts import documents

Encode = Callable[[str], list[int]]
HideFact = Callable[[Sequence[int], Sequence[int], Sequence[int], int, float], list[int]]

_PLACES = (
    "the harbour", "the old mill", "the library", "the red barn",
    "the station", "the museum", "the bakery", "the lighthouse",
)  # fmt: skip
_MIN_LINE, _MAX_LINE = 12, 70


def retrieval_questions(
    encode: Encode, hide_fact: HideFact, count: int, length: int, seed: int, num_choices: int = 4
) -> list[ChoiceQuestion]:
    """Facts hidden in evaluation prose: where was the number said?

    Every other number is in the text as well, as the number of another place, so that a model can't answer by looking
    for any number at all. The text of each question comes from other pages, and its fact from another depth, evenly
    from 0 to 1.

    Args:
        encode: turns text into token ids, without tokens that begin or end a text.
        hide_fact: task 9's.
        count: how many questions.
        length: tokens of each text.
        seed: chooses numbers, places and pages.
        num_choices: how many numbers there are to choose from, 2 to 8.

    Raises:
        ValueError: a count out of range, or texts too short for the length.
    """
    check_count("count", count, 1)
    check_count("num_choices", num_choices, 2)
    if num_choices > len(_PLACES):
        raise ValueError(f"num_choices must be at most {len(_PLACES)}, got {num_choices}")
    dice = random.Random(seed)
    pages = list(documents("prose", "evaluation").values())
    questions = []
    for index in range(count):
        places = dice.sample(_PLACES, num_choices)
        codes = dice.sample(range(1000, 10000), num_choices)
        others = "".join(_fact(place, code) for place, code in zip(places[1:], codes[1:], strict=True))
        filler = encode(others) + encode(" ".join(dice.sample(pages, min(8, len(pages)))))
        question = encode(f"\nQuestion: What is the code of {places[0]}?\nAnswer: The code of {places[0]} is")
        depth = index / max(count - 1, 1)
        context = hide_fact(filler, encode(_fact(places[0], codes[0])), question, length, depth)
        order = dice.sample(range(num_choices), num_choices)
        choices = tuple(tuple(encode(f" {codes[choice]}")) for choice in order)
        questions.append(ChoiceQuestion(tuple(context), choices, order.index(0)))
    return questions


def code_questions(
    encode: Encode, count: int, context_lines: int, seed: int, num_choices: int = 4
) -> list[ChoiceQuestion]:
    """Which line of a module of the standard library comes next?

    The wrong choices are lines of the same module with the same indentation, so that neither names nor layout alone
    give the answer away. Modules are those of the evaluation part.

    Args:
        encode: turns text into token ids, without tokens that begin or end a text.
        count: how many questions.
        context_lines: lines before the one to guess.
        seed: chooses modules and lines.
        num_choices: lines to choose from, at least 2.

    Raises:
        ValueError: a count out of range.
    """
    check_count("count", count, 1)
    check_count("context_lines", context_lines, 1)
    check_count("num_choices", num_choices, 2)
    dice = random.Random(seed)
    modules = [text.splitlines() for text in documents("code", "evaluation").values()]
    questions: list[ChoiceQuestion] = []
    while len(questions) < count:
        lines = dice.choice(modules)
        at = dice.randrange(len(lines))
        right = lines[at]
        alike = {line for line in lines if line != right and _indent(line) == _indent(right) and _usable(line)}
        if at < context_lines or not _usable(right) or len(alike) < num_choices - 1:
            continue
        texts = [right, *dice.sample(sorted(alike), num_choices - 1)]
        order = dice.sample(range(num_choices), num_choices)
        context = "\n".join(lines[at - context_lines : at]) + "\n"
        choices = tuple(tuple(encode(texts[choice] + "\n")) for choice in order)
        questions.append(ChoiceQuestion(tuple(encode(context)), choices, order.index(0)))
    return questions


def _fact(place: str, code: int) -> str:
    return f"\nThe code of {place} is {code}.\n"


def _usable(line: str) -> bool:
    """Whether a line says something: no comment, and neither a bracket nor half a page."""
    return _MIN_LINE <= len(line.strip()) <= _MAX_LINE and not line.strip().startswith(("#", '"', "'"))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
