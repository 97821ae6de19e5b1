"""Carries a step out: the moves, then one pass of the model over all its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .attention import PagedAttention
from .kv_pool import KVPool
from .models.packed_attention import PackedAttention
from .padded_decoding import PaddedDecoding
from .step import Step, Work


class PackedModel(Protocol):
    """A model over tokens of many requests laid end to end; see `models.blocks.Decoder`."""

    def __call__(self, tokens: Tensor, positions: Tensor, attend: PackedAttention, rows: Tensor) -> Tensor:
        """Logits `[rows, vocab_size]`."""


class ModelRunner:
    """Runs steps, where the pool lies.

    Args:
        model: what computes.
        pool: where keys and values lie.
        attend: makes the attention of a step.
        decoding: computes the steps that it takes, which are pure decodes; None leaves it all to the one way.
    """

    def __init__(
        self, model: PackedModel, pool: KVPool,
        attend: Callable[[KVPool, tuple[Work, ...]], PackedAttention] = PagedAttention,
        decoding: PaddedDecoding | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._pool = pool
        self._attend = attend
        self._decoding = decoding

    @property
    def device(self) -> torch.device:
        """Where steps are computed."""
        return self._pool.device

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Computes a step.

        Returns:
            Logits `[rows, vocab_size]`, in the order of the step's work, for each as many rows as it wants. The next
            step may overwrite them.
        """
        self._pool.move(step.moves)
        if self._decoding is not None and self._decoding.takes(step):
            return self._decoding.run(step)
        rows, end = list[int](), 0
        for work in step.work:
            end += len(work.tokens)
            rows += range(end - work.num_rows, end)
        return self._model(
            self._on_device([token for work in step.work for token in work.tokens]),
            self._on_device([position for work in step.work for position in range(work.start, work.end)]),
            self._attend(self._pool, step.work),
            self._on_device(rows),
        )

    def _on_device(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._pool.device)
