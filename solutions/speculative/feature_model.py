"""Task 12b: a target that remembers what it thought of each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.decoder import Decoder
from labkit.features import RecordingDecoder

from .tree_model import TreeModel


class FeatureModel(TreeModel):
    """The target of task 8 with the hidden states of its text, for drafters that read them.

    It serves `speculate_tree` and, since it can forget the end of its text, `speculate`, too. The drafter gets the
    very object that the loop gets: `speculate(model, SomeDrafter(model, ...), prompt, ...)`.

    Args:
        decoder: the given decoder.
        capacity: the most tokens that it remembers, drafts included.
        layers: which hidden states; see `labkit.features.RecordingDecoder`.

    Raises:
        ValueError: `capacity` is no int of at least 1, or a layer that the decoder doesn't have.
    """

    def __init__(self, decoder: Decoder, capacity: int, layers: Sequence[int]) -> None:
        self._recorder = RecordingDecoder(decoder, layers)
        super().__init__(self._recorder, capacity)
        self._features = self._recorder.recorded[0]

    def features(self) -> Tensor:
        """Row i of token i, `[length, layers * hidden]`; rows of drafts count until `keep` says which came true."""
        return self._features

    def append(self, tokens: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] = ()) -> Tensor:
        """Read text and drafts as `TreeModel.append` does, and remember their features."""
        # BEGIN SOLUTION
        logits = super().append(tokens, drafts, parents)
        self._features = torch.cat([self._features, self._recorder.recorded[0]])
        return logits
        # END SOLUTION

    def keep(self, path: Sequence[int]) -> None:
        """Keep drafts as `TreeModel.keep` does, and their features alone."""
        # BEGIN SOLUTION
        text = self.length - self._num_drafts
        super().keep(path)
        self._features = self._features[[*range(text), *(text + index for index in path)]]
        # END SOLUTION

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on.

        Raises:
            ValueError: `length` is no int from 0 to the present length, or drafts of a tree are still there. Nothing
                has changed then.
        """
        check_count("length", length, 0)
        if length > self.length:
            raise ValueError(f"length must be at most the {self.length} tokens remembered, got {length}")
        # BEGIN SOLUTION
        if self._num_drafts:
            raise ValueError(f"{self._num_drafts} drafts are still here; say with keep which of them came true")
        self._keys = [keys[:, :, :length] for keys in self._keys]
        self._values = [values[:, :, :length] for values in self._values]
        self._features = self._features[:length]
        # END SOLUTION
