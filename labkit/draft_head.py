"""A head that drafts from features, at work on one text: its keys and values, and its draft vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.config import ModelConfig
from labkit.decoder import Attend
from labkit.decoder_layer import rms_norm
from labkit.protocols import Spec


class DraftHead(Protocol):
    """Reads rows, each a hidden state with the token behind it, and says what each row leads to."""

    @property
    def length(self) -> int:
        """Rows remembered."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the target."""

    def read(self, features: Tensor) -> Tensor:
        """What the rows hold of the target's features: `[rows, width] -> [rows, hidden]`."""

    def append(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Reads new rows behind those remembered.

        Args:
            hidden: `[rows, hidden]`, of `read` or of an earlier `append`.
            tokens: int64 `[rows]`, the token behind each hidden state.
            positions: int64 `[rows]`.
            mask: bool `[rows, length + rows]`, True where a row may look.

        Returns:
            The hidden state of each row's token, `[rows, hidden]`.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the token that follows, `[rows, vocab_size]`; -inf where the head never drafts a token."""

    def truncate(self, length: int) -> None:
        """Forgets the rows from `length` on."""


class CachedHead:
    """A `DraftHead` from the forward function of one layer; what is special to a head stands in its subclass.

    Args:
        config: shape of the layer, and the target's vocabulary.
        weights: of the head, with "embed_tokens.weight" `[vocab_size, hidden]` and "lm_head.weight"
            `[draft vocabulary, hidden]`; "norm.weight", if it is there, is the norm before that.
        target_ids: int64, the target's id of each token of the draft vocabulary, none twice; None means that they
            are the same.

    Raises:
        ValueError: embeddings or output matrix missing or of another size, or ids that are none or come twice.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], target_ids: Tensor | None = None) -> None:
        for name in ("embed_tokens.weight", "lm_head.weight"):
            if name not in weights:
                raise ValueError(f"weights lack {name}; the target's own will do, cut to the draft vocabulary")
        embeddings = weights["embed_tokens.weight"]
        if tuple(embeddings.shape) != (config.vocab_size, config.hidden_size):
            raise ValueError(
                f"embed_tokens.weight must be {[config.vocab_size, config.hidden_size]}, got {list(embeddings.shape)}"
            )
        check_draft_vocabulary(target_ids, weights["lm_head.weight"].shape[0], config.vocab_size)
        self.config = config
        self.weights = weights
        self._target_ids = target_ids
        empty = torch.zeros(1, config.num_kv_heads, 0, config.head_dim, dtype=embeddings.dtype)
        self._keys, self._values = empty, empty

    @property
    def length(self) -> int:
        """Rows remembered."""
        return int(self._keys.shape[2])

    @property
    def vocab_size(self) -> int:
        """Token ids of the target."""
        return self.config.vocab_size

    def read(self, features: Tensor) -> Tensor:
        """The features as they are."""
        return features

    def step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The forward function of the layer, `[1, rows, hidden]`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its layer computes")

    def append(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Reads new rows; see `DraftHead`."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            self._keys, self._values = torch.cat([self._keys, k], 2), torch.cat([self._values, v], 2)
            return F.scaled_dot_product_attention(q, self._keys, self._values, attn_mask=mask, enable_gqa=True)

        with torch.no_grad():
            return self.step(hidden[None], tokens[None], positions[None], attend)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the token that follows, `[rows, vocab_size]`; -inf where the head never drafts a token."""
        if "norm.weight" in self.weights:
            hidden = rms_norm(hidden, self.weights["norm.weight"], self.config.norm_eps)
        return spread(F.linear(hidden, self.weights["lm_head.weight"]), self._target_ids, self.vocab_size)

    def truncate(self, length: int) -> None:
        """Forgets the rows from `length` on."""
        self._keys, self._values = self._keys[:, :, :length], self._values[:, :, :length]


def spread(logits: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits of a draft vocabulary over the target's: `[..., drafts] -> [..., vocab_size]`, -inf where it has none."""
    if target_ids is None:
        return logits
    wide = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    wide[..., target_ids] = logits
    return wide


def check_draft_vocabulary(target_ids: Tensor | None, size: int, vocab_size: int) -> None:
    """Refuse a draft vocabulary that doesn't fit.

    Args:
        target_ids: the target's id of each token of the draft vocabulary; None means that they are the same.
        size: of the draft vocabulary, rows of the output matrix.
        vocab_size: of the target.

    Raises:
        ValueError: other than `size` ids, an id that the target doesn't have, or one twice.
    """
    if target_ids is None:
        if size != vocab_size:
            raise ValueError(
                f"lm_head.weight has {size} rows for {vocab_size} tokens; name their tokens by target_ids"
            )  # fmt: skip
        return
    ids = target_ids.tolist()
    if target_ids.dtype != torch.int64 or len(ids) != size or len(set(ids)) != size:
        raise ValueError(f"target_ids must be {size} different int64, one a row of lm_head.weight, got {len(ids)}")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"target_ids must lie between 0 and {vocab_size - 1}, got {min(ids)} to {max(ids)}")


@dataclass(frozen=True)
class ScriptedHead(Spec):
    """A `DraftHead` whose answers come from the test's own functions, so that the test sees every call.

    Args:
        vocab_size: token ids of the target.
        read: see `DraftHead.read`.
        append: see `DraftHead.append`.
        logits: see `DraftHead.logits`.
        truncate: takes the new length.
        length: returns the rows remembered.
    """

    vocab_size: int
    read: Callable[[Tensor], Tensor]
    append: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    truncate: Callable[[int], None]
    length: Callable[[], int]

    def build(self) -> DraftHead:
        """An object that calls back."""
        return _Scripted(self)


class _Scripted:
    """Shows a script's functions as the methods and properties of the protocol."""

    def __init__(self, script: ScriptedHead) -> None:
        self.vocab_size = script.vocab_size
        self.read = script.read
        self.append = script.append
        self.logits = script.logits
        self.truncate = script.truncate
        self._script = script

    @property
    def length(self) -> int:
        """Rows remembered, by the test's count."""
        return self._script.length()
