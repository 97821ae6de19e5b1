"""The target for many texts at once: one pass of the decoder over what is new in each, trees of drafts included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checks import check_count
from labkit.decoder import Decoder
from labkit.features import RecordingDecoder

from .lookahead import LookaheadDrafter
from .tree_model import check_path, checked_pass, pass_layout


class BatchModel:
    """Keys, values and hidden states of many texts: `TreeModel` and `FeatureModel` for `speculate_batch`.

    A pass is as wide as the text with the most new tokens and drafts; the others are filled up, and what fills them is
    computed and thrown away. So drafts of one request cost time in all rows.

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
        self._num_drafts = [0] * texts
        self._capacity = capacity
        self._observers: dict[int, LookaheadDrafter] = {}

    @property
    def capacity(self) -> int:
        """Tokens of one text that can be remembered, drafts included."""
        return self._capacity

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to `vocab_size - 1`."""
        return self._recorder.config.vocab_size

    def run(
        self, ids: list[int], tokens: list[list[int]], drafts: list[list[int]], parents: list[Sequence[int]]
    ) -> list[Tensor]:
        """Read new tokens of some texts and a tree of drafts behind each, all in one pass.

        Args:
            ids: of the texts, none twice.
            tokens: they continue the text, at least one for each.
            drafts: ids of the drafts of each, maybe none.
            parents: for each draft the index of the one before it, -1 for those that follow the text.

        Returns:
            For each text the logits `[tokens + drafts, vocab_size]`, as of `TreeModel.append`.

        Raises:
            ValueError: no texts, one twice, one that isn't there, one without tokens, an id outside the vocabulary,
                other than one parent for each draft, no room, or drafts that are still there. Nothing has run then.
        """
        rows = self._checked(ids, tokens, drafts, parents)
        starts = [self._lengths[index] for index in ids]
        width = max(map(len, rows))
        end = max(start + len(row) for start, row in zip(starts, rows, strict=True))
        padded = torch.zeros(len(ids), width, dtype=torch.int64)
        places = torch.zeros(len(ids), width, dtype=torch.int64)
        # What fills a row up sees all there is: it is thrown away, but a softmax over nothing would be NaN.
        seen = torch.ones(len(ids), 1, width, end, dtype=torch.bool)
        for i, (start, new, row, tree) in enumerate(zip(starts, tokens, rows, parents, strict=True)):
            mask, positions = pass_layout(start, len(new), tree)
            padded[i, : len(row)] = torch.tensor(row)
            places[i, : len(row)] = positions
            seen[i, 0, : len(row)] = F.pad(mask, (0, end - mask.shape[1]))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            for i, (index, start, row) in enumerate(zip(ids, starts, rows, strict=True)):
                place = slice(start, start + len(row))
                keys[index, :, place], values[index, :, place] = k[i, :, : len(row)], v[i, :, : len(row)]
            return F.scaled_dot_product_attention(
                q, keys[ids, :, :end], values[ids, :, :end], attn_mask=seen, enable_gqa=True
            )

        with torch.no_grad():
            logits = self._recorder(padded, places, attend)
        answers = [logits[i, : len(row)] for i, row in enumerate(rows)]
        for i, (index, row) in enumerate(zip(ids, rows, strict=True)):
            self._features[index, starts[i] : starts[i] + len(row)] = self._recorder.recorded[i, : len(row)]
            self._lengths[index] += len(row)
            self._num_drafts[index] = len(drafts[i])
            if index in self._observers:
                likeliest = answers[i][len(tokens[i]) - 1 :].argmax(-1).tolist()
                self._observers[index].observe(drafts[i], parents[i], likeliest)
        return answers

    def keep(self, index: int, path: Sequence[int]) -> None:
        """Make the drafts of a path part of a text, in this order, and forget its others.

        Args:
            index: of the text.
            path: indices of drafts of its last pass, each the parent of the next; may be empty.

        Raises:
            ValueError: an index that is no draft, or they aren't in rising order. Nothing has changed then.
        """
        check_path(path, self._num_drafts[index])
        start = self._lengths[index] - self._num_drafts[index]
        self._lengths[index] = start + len(path)
        self._num_drafts[index] = 0
        if list(path) == list(range(len(path))):
            return
        kept = [start + draft for draft in path]
        place = slice(start, start + len(path))
        self._keys[:, index, :, place] = self._keys[:, index][:, :, kept]
        self._values[:, index, :, place] = self._values[:, index][:, :, kept]
        self._features[index, place] = self._features[index, kept]

    def truncate(self, index: int, length: int) -> None:
        """Forget the tokens of a text from position `length` on.

        Raises:
            ValueError: `length` is no int from 0 to the text's present length, or drafts are still there.
        """
        check_count("length", length, 0)
        if length > self._lengths[index]:
            raise ValueError(f"length must be at most the {self._lengths[index]} tokens remembered, got {length}")
        if self._num_drafts[index]:
            raise ValueError(f"{self._num_drafts[index]} drafts are still here; say with keep which of them came true")
        self._lengths[index] = length

    def source(self, index: int) -> TextFeatures:
        """The features of one text, for its drafter."""
        return TextFeatures(self, index)

    def features_of(self, index: int) -> Tensor:
        """Row i of token i, `[length, width]`; rows of drafts count until `keep` says which came true."""
        return self._features[index, : self._lengths[index]]

    def let_observe(self, index: int, drafter: LookaheadDrafter) -> None:
        """Tell a drafter what the target says behind each draft of one text, as `LookaheadModel` does."""
        self._observers[index] = drafter

    def _checked(
        self, ids: list[int], tokens: list[list[int]], drafts: list[list[int]], parents: list[Sequence[int]]
    ) -> list[list[int]]:
        """All ids of each text's part of a pass, or a ValueError."""
        if not ids or len(set(ids)) != len(ids) or not len(ids) == len(tokens) == len(drafts) == len(parents):
            raise ValueError(
                f"a pass needs different texts, and tokens, drafts and parents for each; got texts {ids} with "
                f"{len(tokens)}, {len(drafts)} and {len(parents)}"
            )
        if any(not 0 <= index < len(self._lengths) for index in ids):
            raise ValueError(f"ids of texts run from 0 to {len(self._lengths) - 1}, got {ids}")
        rows = []
        for index, new, guesses, before in zip(ids, tokens, drafts, parents, strict=True):
            room = self._capacity - self._lengths[index]
            try:
                rows.append(checked_pass(new, guesses, before, self.vocab_size, self._num_drafts[index], room))
            except ValueError as error:
                raise ValueError(f"text {index}: {error}") from error
        return rows


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
