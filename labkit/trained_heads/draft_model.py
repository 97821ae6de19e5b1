"""The trained draft model at work on one text: a small decoder that speaks the frequent tokens only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checks import check_count, check_tokens
from labkit.decoder import Decoder
from labkit.draft_head import spread
from labkit.trained_heads.loading import TrainedHead


class DraftModel:
    """A `CachedModel` from the head "draft"; tokens outside the draft vocabulary are read, but never said.

    Args:
        head: of `load_head("draft", target)`.
        capacity: tokens that it agrees to remember.

    Raises:
        ValueError: `capacity` is no int of at least 1, or another head.
    """

    def __init__(self, head: TrainedHead, capacity: int) -> None:
        check_count("capacity", capacity, 1)
        weights = {name: weight for name, weight in head.weights.items() if name.startswith("model.")}
        if "model.norm.weight" not in weights:
            raise ValueError("this head is no model of its own; give that of load_head('draft', target)")
        embeddings = head.weights["embed_tokens.weight"]
        self._decoder = Decoder(head.config, {**weights, "model.embed_tokens.weight": embeddings})
        self._output, self._target_ids = head.weights["lm_head.weight"], head.target_ids
        self._capacity = capacity
        empty = torch.zeros(1, head.config.num_kv_heads, 0, head.config.head_dim)
        self._keys, self._values = [empty] * head.config.num_layers, [empty] * head.config.num_layers

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return int(self._keys[0].shape[2])

    @property
    def capacity(self) -> int:
        """Tokens that can be remembered."""
        return self._capacity

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self._decoder.config.vocab_size

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Reads new tokens; the logits after each, `[new, vocab_size]`, -inf outside the draft vocabulary.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or no room. Nothing has run then.
        """
        ids = check_tokens("tokens", tokens, self.vocab_size)
        start, end = self.length, self.length + len(ids)
        if end > self.capacity:
            raise ValueError(f"{start} + {len(ids)} tokens exceed the capacity of {self.capacity}")
        mask = torch.ones(len(ids), end, dtype=torch.bool).tril(start)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            self._keys[layer] = torch.cat([self._keys[layer], k], 2)
            self._values[layer] = torch.cat([self._values[layer], v], 2)
            return F.scaled_dot_product_attention(
                q, self._keys[layer], self._values[layer], attn_mask=mask, enable_gqa=True
            )

        with torch.no_grad():
            *_, hidden = self._decoder.hidden_states(torch.tensor([ids]), torch.arange(start, end), attend)
            return spread(F.linear(hidden[0], self._output), self._target_ids, self.vocab_size)

    def truncate(self, length: int) -> None:
        """Forgets the tokens from position `length` on.

        Raises:
            ValueError: `length` is no int from 0 to the present length.
        """
        check_count("length", length, 0)
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens remembered, got {length}")
        self._keys = [keys[:, :, :length] for keys in self._keys]
        self._values = [values[:, :, :length] for values in self._values]
