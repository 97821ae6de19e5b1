"""Task 9: questions with choices: a fact hidden in a long text, the line of code that comes next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.evaluation import ChoiceQuestion

from .perplexity import Logits, next_token_losses


def hide_fact(
    filler: Sequence[int], fact: Sequence[int], question: Sequence[int], length: int, depth: float
) -> list[int]:
    """A long text with a fact in it and the question about it at its end.

    Args:
        filler: token ids of some text; as much of its beginning is used as is needed.
        fact: token ids of a sentence.
        question: token ids that the answer follows.
        length: of the whole, in tokens.
        depth: where the fact stands: 0 at the very beginning, 1 right before the question. Of the filler tokens that
            there is room for, `round(depth · room)` stand before it.

    Returns:
        Exactly `length` token ids.

    Raises:
        ValueError: nothing to hide or to ask, a filler that is too short, a length that fact and question alone
            exceed, or a depth outside 0 … 1.
    """
    texts = [list(filler), check_tokens("fact", fact), check_tokens("question", question)]
    check_count("length", length, 1)
    room = length - len(texts[1]) - len(texts[2])
    if not 0 <= room <= len(texts[0]):
        raise ValueError(
            f"length must be from {length - room} tokens, of fact and question, to {length - room + len(texts[0])}, "
            f"with all of the filler; got {length}"
        )
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be from 0 to 1, got {depth!r}")
    # BEGIN SOLUTION
    text, needle, end = texts
    before = round(depth * room)
    return [*text[:before], *needle, *text[before:room], *end]
    # END SOLUTION


def choice_losses(logits: Logits, context: Sequence[int], choices: Sequence[Sequence[int]]) -> Tensor:
    """How unlikely a model finds each of several continuations of a text.

    Args:
        logits: the model, as for `token_losses`; called once for each choice.
        context: token ids of the text, at least one.
        choices: token ids of each continuation, at least one of them.

    Returns:
        -ln p of each choice given the context, summed over the choice's tokens, float64 `[choices]`.

    Raises:
        ValueError: an empty context or choice, no choices, or logits that are refused.
    """
    before = check_tokens("context", context)
    if not choices:
        raise ValueError("choices must hold at least one continuation, got none")
    ends = [check_tokens(f"choices[{index}]", choice) for index, choice in enumerate(choices)]
    # BEGIN SOLUTION
    return torch.stack([next_token_losses(logits, [*before, *end], len(before)).sum() for end in ends])
    # END SOLUTION


def answer_questions(logits: Logits, questions: Sequence[ChoiceQuestion], *, per_token: bool = False) -> Tensor:
    """Which questions a model gets right by liking the right choice best.

    Args:
        logits: the model.
        questions: at least one.
        per_token: compare the mean loss of a choice's tokens instead of the sum; fair where choices differ much in
            length, since every further token makes a choice less likely.

    Returns:
        1 for each question whose answer has the smallest loss of all choices, 0 for the others, float64
        `[questions]`. A tie is no answer: a model that finds all choices equal knows nothing. One number a question
        makes one block for `paired_bootstrap`.

    Raises:
        ValueError: no questions, or logits that are refused.
    """
    if not questions:
        raise ValueError("questions must hold at least one question, got none")
    # BEGIN SOLUTION
    right = []
    for question in questions:
        losses = choice_losses(logits, question.context, question.choices)
        if per_token:
            losses = losses / torch.tensor([len(choice) for choice in question.choices])
        others = torch.cat((losses[: question.answer], losses[question.answer + 1 :]))
        right.append(float(losses[question.answer] < others.min()))
    return torch.tensor(right, dtype=torch.float64)
    # END SOLUTION
