"""The target for many texts at once: one pass of the decoder over what is new in each, drafts included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checks import check_count
from labkit.decoder import Decoder
from labkit.features import RecordingDecoder


class BatchModel:
    """Keys, values and hidden states of many texts, for `speculate_batch`: give it `run` and `truncate`.

    A pass is as wide as the text with the most new tokens; the others are filled up, and what fills them is computed
    and thrown away. So drafts of one request cost time in all rows.

    Args:
        decoder: the given decoder.
        texts: ids run from 0 to `texts - 1`.
        capacity: the most tokens of one text, drafts included.
        layers: hidden states that drafters read; none means that nobody does.

    Raises:
        ValueError: a number that is no int of at least 1, or a layer that the decoder doesn't have.
    """

    def __init__(self, decoder: Decoder, texts: int, capacity: int, layers: Sequence[int] = ()) -> None:
        check_count("texts", texts, 1)
        check_count("capacity", capacity, 1)
        config = decoder.config
        shape = (config.num_layers, texts, config.num_kv_heads, capacity, config.head_dim)
        self._recorder = RecordingDecoder(decoder, layers or (config.num_layers,))
        self._keys, self._values = (torch.zeros(shape, dtype=decoder.dtype) for _ in range(2))
        self._features = torch.zeros(texts, capacity, self._recorder.width, dtype=decoder.dtype)
        self._lengths = [0] * texts
        self._capacity = capacity

    def run(self, ids: list[int], tokens: list[list[int]]) -> list[Tensor]:
        """Read new tokens of some texts in one pass.

        Args:
            ids: of the texts, none twice.
            tokens: the new ones of each, at least one.

        Returns:
            For each text the logits `[new, vocab_size]`.

        Raises:
            ValueError: no texts, one without tokens, or no room. Nothing has run then.
        """
        if not ids or len(ids) != len(tokens) or not all(tokens):
            raise ValueError(f"{len(ids)} texts need as many runs of at least one token, got {list(map(len, tokens))}")
        for index, new in zip(ids, tokens, strict=True):
            if self._lengths[index] + len(new) > self._capacity:
                raise ValueError(
                    f"text {index}: {self._lengths[index]} + {len(new)} tokens exceed the capacity {self._capacity}"
                )
        starts = torch.tensor([self._lengths[index] for index in ids])
        width = max(map(len, tokens))
        padded = torch.tensor([new + [0] * (width - len(new)) for new in tokens])
        places = starts[:, None] + torch.arange(width)
        end = max(start + len(new) for start, new in zip(starts.tolist(), tokens, strict=True))
        seen = (torch.arange(end) <= places[..., None])[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            for row, (index, new) in enumerate(zip(ids, tokens, strict=True)):
                place = slice(self._lengths[index], self._lengths[index] + len(new))
                keys[index, :, place], values[index, :, place] = k[row, :, : len(new)], v[row, :, : len(new)]
            return F.scaled_dot_product_attention(
                q, keys[ids, :, :end], values[ids, :, :end], attn_mask=seen, enable_gqa=True
            )

        with torch.no_grad():
            # What fills a row up may stand beyond the context; its position means nothing.
            logits = self._recorder(padded, places.clamp(max=self._recorder.config.max_context - 1), attend)
        for row, (index, new) in enumerate(zip(ids, tokens, strict=True)):
            start = self._lengths[index]
            self._features[index, start : start + len(new)] = self._recorder.recorded[row, : len(new)]
            self._lengths[index] += len(new)
        return [logits[row, : len(new)] for row, new in enumerate(tokens)]

    def truncate(self, index: int, length: int) -> None:
        """Forget the tokens of a text from position `length` on.

        Raises:
            ValueError: `length` is no int from 0 to the text's present length.
        """
        check_count("length", length, 0)
        if length > self._lengths[index]:
            raise ValueError(f"length must be at most the {self._lengths[index]} tokens remembered, got {length}")
        self._lengths[index] = length

    def source(self, index: int) -> TextFeatures:
        """The features of one text, for its drafter."""
        return TextFeatures(self, index)

    def features_of(self, index: int) -> Tensor:
        """Row i of token i, `[length, width]`."""
        return self._features[index, : self._lengths[index]]


@dataclass(frozen=True)
class TextFeatures:
    """A `FeatureSource` for the drafter of one text of a batch.

    Args:
        model: remembers the features of all.
        index: of the text.
    """

    model: BatchModel
    index: int

    def features(self) -> Tensor:
        """Row i of token i."""
        return self.model.features_of(self.index)
