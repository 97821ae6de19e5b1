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
        ids = checked_pass(tokens, drafts, parents, self.vocab_size, self._num_drafts, self._capacity - self.length)
        # BEGIN SOLUTION
        mask, places = pass_layout(self.length, len(tokens), parents)

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
        check_path(path, self._num_drafts)
        # BEGIN SOLUTION
        text = self.length - self._num_drafts
        kept = torch.tensor([*range(text), *(text + index for index in path)])
        self._keys = [keys[:, :, kept] for keys in self._keys]
        self._values = [values[:, :, kept] for values in self._values]
        self._num_drafts = 0
        # END SOLUTION


# BEGIN SOLUTION
def pass_layout(start: int, count: int, parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Who sees whom in a pass over text and drafts, and where each stands.

    Args:
        start: tokens remembered.
        count: new tokens of the text, at least one.
        parents: of the drafts behind them.

    Returns:
        bool `[count + drafts, start + count + drafts]`, True where a row may look, and positions, int64
        `[count + drafts]`.
    """
    rows = count + len(parents)
    mask = torch.zeros(rows, start + rows, dtype=torch.bool)
    mask[:, : start + count] = torch.ones(rows, start + count, dtype=torch.bool).tril(start)
    mask[count:, start + count :] = ancestor_mask(parents)
    return mask, torch.cat([torch.arange(start, start + count), tree_positions(parents, start + count)])


# END SOLUTION


def checked_pass(
    tokens: Sequence[int], drafts: Sequence[int], parents: Sequence[int], vocab_size: int, num_drafts: int, room: int
) -> list[int]:
    """All ids of a pass, the text's and then the drafts'.

    Args:
        tokens: as for `TreeModel.append`.
        drafts: likewise.
        parents: likewise.
        vocab_size: of the target.
        num_drafts: drafts of an earlier pass that nobody has judged.
        room: tokens that can still be remembered.

    Raises:
        ValueError: no tokens, an id outside the vocabulary, other than one parent for each draft, no room, or drafts
            that are still there.
    """
    ids = [*check_tokens("tokens", tokens, vocab_size), *(check_tokens("drafts", drafts, vocab_size) if drafts else [])]
    if len(parents) != len(drafts):
        raise ValueError(f"{len(drafts)} drafts need as many parents, got {len(parents)}")
    if num_drafts:
        raise ValueError(f"{num_drafts} drafts are still here; say with keep which of them came true")
    if len(ids) > room:
        raise ValueError(f"{len(ids)} new tokens exceed the capacity: there is room for {room}")
    return ids


def check_path(path: Sequence[int], num_drafts: int) -> None:
    """Refuse a path that can't become text.

    Raises:
        ValueError: an index that is no draft, or they aren't in rising order.
    """
    indices = list(path)
    if indices != sorted(set(indices)) or any(not 0 <= index < num_drafts for index in indices):
        raise ValueError(f"path must rise within the {num_drafts} drafts, got {indices}")
