"""A model whose keys and values are the token ids themselves: it answers from what it finds in the blocks of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.generation_request import GenerationRequest
from labkit.step_plan import StepPlan

VOCAB = 5
"""Few token ids, so that prompts share prefixes and a wrong token is often a plausible one."""


def next_token(tokens: list[int]) -> int:
    """The model of these schedules: the next token depends on all tokens so far, and on their order."""
    return (3 * len(tokens) + sum((i % 7 + 1) * token for i, token in enumerate(tokens))) % VOCAB


class SlotModel:
    """Runs plans and writes them down; a slot that holds somebody else's token, or none, shows in the answer.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> list[Tensor]:
        """The plan's copies, then all chunks; for each the logits `[vocab]` after its last token."""
        self.plans.append(plan)
        for source, target, pairs in ((self.device, self.host, plan.swap_out), (self.host, self.device, plan.swap_in)):
            for block, copy in pairs:
                target[copy] = list(source.get(block, self._empty()))
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.tokens, start=chunk.start):
                slots = self.device.setdefault(chunk.blocks[position // self.block_size], self._empty())
                slots[position % self.block_size] = token
        rows = []
        for chunk in plan.chunks:
            held = [token for block in chunk.blocks for token in self.device.get(block, self._empty())]
            token = next_token(held[: chunk.start + len(chunk.tokens)])
            rows.append(torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float())
        return rows

    def _empty(self) -> list[int]:
        # No token id, so that a slot that nobody wrote changes every answer that it is read for.
        return [101] * self.block_size


def alone(request: GenerationRequest, shift: int = 0) -> list[int]:
    """What a request gives by itself, when token number i is `(likeliest + shift · i) % VOCAB`."""
    tokens = list(request.prompt)
    while (step := len(tokens) - len(request.prompt)) < request.max_new_tokens:
        tokens.append((next_token(tokens) + shift * step) % VOCAB)
        if tokens[-1] in request.stop_tokens:
            break
    return tokens[len(request.prompt) :]
