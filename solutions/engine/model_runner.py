"""Carries a step out: the moves, then one pass of the model over all its tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .attention import PagedAttention
from .kv_memory import KVMemory, MakeAttention
from .models.packed_attention import PackedAttention
from .step import Step


class PackedModel(Protocol):
    """A model over tokens of many requests laid end to end; see `models.blocks.Decoder`."""

    def __call__(self, tokens: Tensor, positions: Tensor, attend: PackedAttention, rows: Tensor) -> Tensor:
        """Logits `[rows, vocab_size]`."""


class ModelRunner:
    """Runs steps.

    Args:
        model: what computes.
        pool: where keys and values lie.
        attend: makes the attention of a step over that pool.
    """

    def __init__(self, model: PackedModel, pool: KVMemory, attend: MakeAttention = PagedAttention) -> None:
        self._model = model
        self._pool = pool
        self._attend = attend

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Computes a step.

        Returns:
            Logits `[rows, vocab_size]`, in the order of the step's work, for each as many rows as it wants.
        """
        self._pool.move(step.moves, step.open_blocks)
        tokens = torch.tensor([token for work in step.work for token in work.tokens])
        positions = torch.cat([torch.arange(work.start, work.end) for work in step.work])
        rows, end = list[int](), 0
        for work in step.work:
            end += len(work.tokens)
            rows += range(end - work.num_rows, end)
        attend = self._attend(self._pool, step.work)
        return self._model(tokens, positions, attend, torch.tensor(rows, dtype=torch.int64))
