"""The text built in place, and answers by sorting the choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.evaluation import ChoiceQuestion


def hide_fact(
    filler: Sequence[int], fact: Sequence[int], question: Sequence[int], length: int, depth: float
) -> list[int]:
    """Insert the fact into the filler, then append the question."""
    if not fact or not question:
        raise ValueError("there must be a fact and a question")
    room = length - len(fact) - len(question)
    if room < 0 or room > len(filler) or depth < 0 or depth > 1:
        raise ValueError(f"no text of {length} tokens with a fact at depth {depth} can be made of this")
    text = list(filler)[:room]
    place = round(depth * room)
    text[place:place] = fact
    text.extend(question)
    return text


def choice_losses(
    logits: Callable[[list[int]], Tensor], context: Sequence[int], choices: Sequence[Sequence[int]]
) -> Tensor:
    """The loss of a choice: log_softmax in float64, picked token by token."""
    if not context or not choices or not all(len(choice) for choice in choices):
        raise ValueError("context and choices must not be empty")
    losses = torch.zeros(len(choices), dtype=torch.float64)
    for index, choice in enumerate(choices):
        rows = logits([*context, *choice])
        if not rows.isfinite().all():
            raise ValueError("logits must be finite")
        log_probs = rows.double().log_softmax(-1)
        for offset, token in enumerate(choice):
            losses[index] -= log_probs[len(context) + offset - 1, token]
    return losses


def answer_questions(
    logits: Callable[[list[int]], Tensor], questions: Sequence[ChoiceQuestion], *, per_token: bool = False
) -> Tensor:
    """Right where the answer alone is first in the ranking."""
    if not questions:
        raise ValueError("no questions")
    found = []
    for question in questions:
        losses = choice_losses(logits, question.context, question.choices).tolist()
        if per_token:
            losses = [loss / len(choice) for loss, choice in zip(losses, question.choices, strict=True)]
        best = [index for index, loss in enumerate(losses) if loss == min(losses)]
        found.append(1.0 if best == [question.answer] else 0.0)
    return torch.tensor(found, dtype=torch.float64)
