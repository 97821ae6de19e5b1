"""The text of a request: what its tokens release, and when it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .detokenizer import TextStream
from .grammar import Matcher
from .request import FinishReason
from .sampling_params import SamplingParams


@dataclass
class Answer:
    """What has been written of one answer.

    Args:
        group: the name that all samples of its prompt share.
        index: which of them it is.
        text: what can be shown.
        matcher: of its constraint, if it has one.
        num_tokens: tokens that belong to it: all but the one that stopped it.
    """

    group: str
    index: int
    text: TextStream
    matcher: Matcher | None = None
    num_tokens: int = 0

    def read(
        self, tokens: Sequence[int], params: SamplingParams, model_stop_ids: Collection[int]
    ) -> tuple[str, FinishReason | None]:
        """Takes in new tokens.

        Args:
            tokens: that its request has grown by.
            params: of the request.
            model_stop_ids: tokens by which the model itself ends a text.

        Returns:
            The text that they release, and why the answer ends with them, if it does: an abort if its constraint
            can't be followed any further.
        """
        if self.matcher is not None and self.matcher.has_failed:
            return self.text.finish(), FinishReason.ABORT
        piece = ""
        for token in tokens:
            if token in params.stop_token_ids or (token in model_stop_ids and not params.ignore_eos):
                return piece + self.text.finish(), FinishReason.STOP
            self.num_tokens += 1
            piece += self.text.feed(token)
            if self.text.stopped:
                return piece, FinishReason.STOP
            if self.matcher is not None and self.matcher.accept(token):
                failed = self.matcher.has_failed
                return piece + self.text.finish(), FinishReason.ABORT if failed else FinishReason.STOP
            if self.num_tokens == params.max_tokens:
                return piece + self.text.finish(), FinishReason.LENGTH
        return piece, None
