"""The small interfaces that labs, tests and the engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class KVStore(Protocol):
    """Keys and values of one batch of sequences, kept for every layer."""

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""

    @property
    def capacity(self) -> int:
        """Tokens that fit."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values, [batch, kv_heads, new, head_dim], and returns all that the layer holds."""

    def truncate(self, length: int) -> None:
        """Forgets every token from position `length` on, in every layer."""


@runtime_checkable
class CachedModel(Protocol):
    """A language model that remembers the tokens it was given, for one sequence."""

    @property
    def length(self) -> int:
        """Tokens it remembers."""

    @property
    def capacity(self) -> int:
        """Tokens it can remember."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; valid ids are 0 … vocab_size − 1."""

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Reads new tokens and returns the logits after each of them, [new, vocab_size]."""

    def truncate(self, length: int) -> None:
        """Forgets every token from position `length` on."""


@dataclass(frozen=True)
class Spec:
    """A recipe. The side that holds the code under test builds it; the test's oracle builds its own."""

    def build(self) -> Any:
        """The object that the lab function receives."""
        raise TypeError(f"{type(self).__name__} does not say how it is built")
