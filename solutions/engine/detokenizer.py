"""Text as it may be shown: whole characters only, and nothing that could still turn out to be a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """The text of one answer, released piece by piece.

    Held back is exactly the longest end of the text that begins a stop text; it is released as soon as the next token
    shows that it does not. Streamed or not, the text is the same.

        tokens   "The"  " end"  "\\nUs"     "ual"
        shown    "The"  " end"  ""         "\\nUsual"      with stop text "\\nUser:"

    Args:
        tokenizer: of the model.
        stop: texts that end the answer.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = tuple(stop)
        self._shown: list[str] = []
        self._held = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """What was released so far."""
        return "".join(self._shown)

    def feed(self, token: int) -> str:
        """Takes the next token, returns the text that it releases. Sets `stopped` when a stop text is complete."""
        return self._take(self._decoder.feed(token))

    def finish(self) -> str:
        """No token follows: releases what was held back, a broken character as U+FFFD. Nothing follows a stop."""
        if self.stopped:
            return ""
        piece = self._take(self._decoder.finish())
        if not self.stopped:
            piece += self._release(self._held)
            self._held = ""
        return piece

    def _take(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        candidate = self._held + text
        found = [place for place in (candidate.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return self._release(candidate[: min(found)])
        kept = max((_overlap(candidate, stop) for stop in self._stop), default=0)
        self._held = candidate[len(candidate) - kept :]
        return self._release(candidate[: len(candidate) - kept])

    def _release(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
