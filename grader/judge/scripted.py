"""Stand-ins that live with the test: they answer like the real thing and write down every call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.specs import ScriptedModel, ScriptedStore


class RecordingStore:
    """A KV store of plain concatenation that remembers what it was asked.

    Args:
        num_layers: of the model that uses it.
        capacity: tokens it claims to hold; it doesn't enforce it.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.appends: list[tuple[int, int, int]] = []
        """(layer, new keys, new values) of each call."""
        self.truncations: list[int] = []
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self._capacity = capacity

    def spec(self) -> ScriptedStore:
        """The argument to pass to the lab in place of a cache."""
        return ScriptedStore(self._capacity, self.append, self.truncate, self.length)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store, write down, return everything of the layer."""
        if not 0 <= layer < len(self.keys):
            raise AssertionError(f"the cache was asked for layer {layer}; the model has {len(self.keys)} layers")
        for name, new, old in (("k", k, self.keys[layer]), ("v", v, self.values[layer])):
            wanted = [] if old is None else [*old.shape[:2], k.shape[2], old.shape[3]]
            if new.dim() != 4 or (wanted and list(new.shape) != wanted):
                raise AssertionError(f"the cache was given {name} of shape {list(new.shape)} for layer {layer}")
        self.appends.append((layer, k.shape[2], v.shape[2]))
        old_k, old_v = self.keys[layer], self.values[layer]
        keys = k.clone() if old_k is None else torch.cat((old_k, k), dim=2)
        values = v.clone() if old_v is None else torch.cat((old_v, v), dim=2)
        self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def truncate(self, length: int) -> None:
        """Forget, and write down."""
        self.truncations.append(length)
        self.keys = [None if t is None else t[:, :, :length] for t in self.keys]
        self.values = [None if t is None else t[:, :, :length] for t in self.values]

    def length(self) -> int:
        """Tokens that every layer holds."""
        return min(0 if t is None else t.shape[2] for t in self.keys)


class RecordingModel:
    """A cached model whose logits follow from the tokens by a rule, and that remembers what it was asked.

    Args:
        vocab_size: number of token ids.
        capacity: tokens it claims to hold; it doesn't enforce it.
        next_token: maps all tokens so far to the one that gets the largest logit.
        held: tokens remembered at the start.
    """

    def __init__(
        self, vocab_size: int, capacity: int, next_token: Callable[[list[int]], int], held: list[int] | None = None
    ) -> None:
        self.calls: list[list[int]] = []
        self.truncations: list[int] = []
        self.tokens = list(held or [])
        self._vocab_size = vocab_size
        self._capacity = capacity
        self._next_token = next_token

    def spec(self) -> ScriptedModel:
        """The argument to pass to the lab in place of a model."""
        return ScriptedModel(self._vocab_size, self._capacity, self.append, self.truncate, self.length)

    def logits_after(self, tokens: list[int]) -> Tensor:
        """`[vocab_size]`: 2 at the next token by the rule; elsewhere below 1, different for every history."""
        logits = torch.arange(self._vocab_size).mul(7 + 3 * len(tokens)).remainder(11).div(11.0)
        logits[self._next_token(tokens)] = 2.0
        return logits

    def append(self, tokens: list[int]) -> Tensor:
        """Remember the tokens, write the call down, return a row of logits for each."""
        if not tokens or not all(0 <= token < self._vocab_size for token in tokens):
            raise AssertionError(f"the model was run on {tokens}; it takes at least one id below {self._vocab_size}")
        self.calls.append(list(tokens))
        rows = []
        for token in tokens:
            self.tokens.append(token)
            rows.append(self.logits_after(self.tokens))
        return torch.stack(rows)

    def truncate(self, length: int) -> None:
        """Forget, and write down."""
        self.truncations.append(length)
        del self.tokens[length:]

    def length(self) -> int:
        """Tokens remembered."""
        return len(self.tokens)
