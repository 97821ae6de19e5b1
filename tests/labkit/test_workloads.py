"""The prompts of the three workloads are there in every Python, and differ."""

from __future__ import annotations

import inspect
from typing import cast

import pytest

from labkit.tokenizer import Tokenizer
from labkit.workloads import FUNCTIONS, WORKLOADS, prompts


class Characters:
    """A tokenizer whose ids are the code points."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(messages[0]["content"])


TOKENIZER = cast("Tokenizer", Characters())


def test_each_function_gives_a_prompt_of_each_kind() -> None:
    assert all(inspect.getdoc(function) for function in FUNCTIONS)
    assert 3 * len(FUNCTIONS) >= 50
    every = [tuple(prompt) for kind in WORKLOADS for prompt in prompts(kind, TOKENIZER, len(FUNCTIONS))]
    assert len(set(every)) == len(every) == 3 * len(FUNCTIONS)
    assert all(len(prompt) >= 40 for prompt in every)


def test_a_prompt_is_cut_to_its_characters() -> None:
    assert [len(prompt) for prompt in prompts("code", TOKENIZER, 2, characters=50)] == [50, 50]


@pytest.mark.parametrize(("workload", "count"), [("prose", 1), ("code", 0), ("code", 99), ("code", True)])
def test_what_is_not_there_is_refused(workload: str, count: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        prompts(workload, TOKENIZER, count)
