"""Task 8b: a target that reads a whole tree in one pass, and keeps one path of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.decoder import Decoder

from .tree import ancestor_mask, tree_positions


class TreeModel:
    """A decoder and the keys and values of one text, with drafts behind it that needn't form a line.

    Args:
        decoder: the given decoder.
        capacity: the most tokens that it remembers, drafts included.

    Raises:
        ValueError: `capacity` is no int of at least 1.
    """

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        check_count("capacity", capacity, 1)
        config = decoder.config
        self._decoder = decoder
        self._capacity = capacity
        empty = torch.zeros(1, config.num_kv_heads, 0, config.head_dim, dtype=decoder.dtype)
        self._keys = [empty] * config.num_layers
        self._values = [empty] * config.num_layers
        self._num_drafts = 0

    @property
    def length(self) -> int:
        """Tokens remembered, drafts included."""
        return int(self._keys[0].shape[2])

    @property
    def capacity(self) -> int:
        """Tokens that can be remembered."""
        return self._capacity

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to `vocab_size - 1`."""
        return self._decoder.config.vocab_size

    def append(self, tokens: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] = ()) -> Tensor:
        """Read new tokens of the text and behind them a tree of drafts, all in one pass.

        Args:
            tokens: they continue the text, at least one.
            drafts: ids of the drafts.
            parents: for each draft the index of the one before it, -1 for those that follow the text.

        Returns:
            Logits `[tokens + drafts, vocab_size]`, each after the token and all that it may see: a token of the text
            the text up to itself, a draft the whole text, its ancestors and itself.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, other than one parent for each draft, no room, or
                drafts are still there: `keep` some of them first. Nothing has run then.
        """
        new = check_tokens("tokens", tokens, self.vocab_size)
        ids = [*new, *(check_tokens("drafts", drafts, self.vocab_size) if drafts else [])]
        if len(parents) != len(drafts):
            raise ValueError(f"{len(drafts)} drafts need as many parents, got {len(parents)}")
        if self._num_drafts:
            raise ValueError(f"{self._num_drafts} drafts are still here; say with keep which of them came true")
        if self.length + len(ids) > self._capacity:
            raise ValueError(f"{self.length} + {len(ids)} tokens exceed the capacity of {self._capacity}")
        # BEGIN SOLUTION
        start, count = self.length, len(new)
        mask = torch.zeros(len(ids), start + len(ids), dtype=torch.bool)
        mask[:, : start + count] = torch.ones(len(ids), start + count, dtype=torch.bool).tril(start)
        mask[count:, start + count :] = ancestor_mask(parents)
        places = torch.cat([torch.arange(start, start + count), tree_positions(parents, start + count)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            self._keys[layer] = torch.cat([self._keys[layer], k], 2)
            self._values[layer] = torch.cat([self._values[layer], v], 2)
            return torch.nn.functional.scaled_dot_product_attention(
                q, self._keys[layer], self._values[layer], attn_mask=mask, enable_gqa=True
            )

        with torch.no_grad():
            logits = self._decoder(torch.tensor([ids]), places, attend)
        self._num_drafts = len(drafts)
        return logits[0]
        # END SOLUTION

    def keep(self, path: Sequence[int]) -> None:
        """Make the drafts of a path part of the text, in this order, and forget the others.

        Their keys were rotated for the very positions at which they then stand, so they only move up.

        Args:
            path: indices of drafts of the last `append`, each the parent of the next; may be empty.

        Raises:
            ValueError: an index that is no draft, or they aren't in rising order. Nothing has changed then.
        """
        indices = list(path)
        if indices != sorted(set(indices)) or any(not 0 <= index < self._num_drafts for index in indices):
            raise ValueError(f"path must rise within the {self._num_drafts} drafts, got {indices}")
        # BEGIN SOLUTION
        text = self.length - self._num_drafts
        kept = torch.tensor([*range(text), *(text + index for index in indices)])
        self._keys = [keys[:, :, kept] for keys in self._keys]
        self._values = [values[:, :, kept] for values in self._values]
        self._num_drafts = 0
        # END SOLUTION
