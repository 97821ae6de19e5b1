"""Decode steps over memory of random numbers, alike in any type: float64 for what is right, float32 for what runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solutions.engine.memory.kv_pool import KVPool
from solutions.engine.model_runner import ModelRunner
from solutions.engine.models.blocks import Decoder
from solutions.engine.step import Step, Work

BLOCK_SIZE, NUM_BLOCKS = 4, 40


def decode_step(lengths: list[int], vocab_size: int, seed: int = 0) -> Step:
    """One token for each of some requests, whose blocks lie anywhere."""
    chance = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_BLOCKS, generator=chance).tolist()
    work = []
    for number, length in enumerate(lengths):
        blocks = tuple(free.pop() for _ in range(-(-length // BLOCK_SIZE)))
        token = int(torch.randint(vocab_size, (1,), generator=chance))
        slot = blocks[-1] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
        request: Any = f"request {number}"  # nothing here looks at it
        work.append(Work(request, length - 1, (token,), 0, (slot,), blocks, gives_token=True))
    return Step(tuple(work))


class Memory:
    """A pool in which a step's requests have random keys and values, and all that is nobody's is NaN.

    Args:
        model: whose, and in what type.
    """

    def __init__(self, model: Decoder) -> None:
        self.pool = KVPool(model.kv_shape, NUM_BLOCKS, BLOCK_SIZE, dtype=model.dtype, device=model.device, scratch=True)
        (plane,) = self.pool._planes
        self._tensors = plane.tensors
        shape = (len(self._tensors), *self._tensors[0].shape)
        self._numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(self._tensors[0])

    def logits(self, runner: ModelRunner, step: Step) -> Tensor:
        """Of a step."""
        unknown = torch.ones(NUM_BLOCKS + 1, BLOCK_SIZE, 1, 1, dtype=torch.bool)
        for work in step.work:
            for position in range(work.start):
                unknown[work.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = False
        self._before = self._numbers.masked_fill(unknown.to(self._numbers.device), torch.nan)
        for tensor, numbers in zip(self._tensors, self._before, strict=True):
            tensor.copy_(numbers)
        return runner.run(step).clone()

    def written(self) -> list[int]:
        """Slots of blocks that the last step has changed."""
        both = torch.stack(self._tensors), self._before
        now, before = (one[:, :NUM_BLOCKS].flatten(1, 2).nan_to_num(7.0) for one in both)
        return (now != before).any(-1).any(-1).any(0).nonzero().flatten().tolist()
