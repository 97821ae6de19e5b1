"""A draft head that lives with the test: its states tell exactly what a row saw, and it writes down every call."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.draft_head import ScriptedHead
from labkit.features import ScriptedFeatures

WIDTH, HIDDEN = 4, 3


@dataclass(frozen=True)
class Row:
    """What a row holds: a hidden state, the token behind it, and where it stands."""

    hidden: tuple[float, ...]
    token: int
    position: int


def state_of(seen: list[Row]) -> tuple[float, ...]:
    """The state that follows from the rows that a row sees, itself the last: whole numbers, other ones for others."""
    number = zlib.crc32(repr([(row.hidden, row.token, row.position) for row in seen]).encode())
    return tuple(float(number >> shift & 0xFF) for shift in (0, 8, 16))


def logits_of(state: tuple[float, ...], vocab_size: int) -> Tensor:
    """`[vocab_size]`, float64; other ones for another state."""
    seed = zlib.crc32(repr(state).encode())
    return 2.0 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def read_of(features: Tensor) -> Tensor:
    """What a head makes of features: `[rows, WIDTH] -> [rows, HIDDEN]`, so that neither passes for the other."""
    return features[:, 1:] * 2 + 1


def features_of(text: list[int]) -> Tensor:
    """The target's features after each token of a text, `[tokens, WIDTH]`; other ones for every beginning."""
    numbers = [zlib.crc32(repr(text[: i + 1]).encode()) for i in range(len(text))]
    return torch.tensor([[float(n >> shift & 0xFF) for shift in (0, 8, 16, 24)] for n in numbers]).double().reshape(
        -1, WIDTH
    )  # fmt: skip


def text_rows(text: list[int]) -> list[Row]:
    """The rows of a text whose features are all known but the newest token's."""
    hidden = read_of(features_of(text[:-1])).tolist()
    return [Row(tuple(h), token, i) for i, (h, token) in enumerate(zip(hidden, text[1:], strict=True))]


def state_after(text: list[int], drafts: list[int]) -> tuple[float, ...]:
    """The state of the newest draft behind a text, by the definition: every row made anew."""
    rows = text_rows(text)
    state = state_of(rows)
    for draft in drafts:
        rows.append(Row(state, draft, len(rows)))
        state = state_of(rows)
    return state


class RecordingHead:
    """A head and a target of which the drafter sees the features.

    Args:
        vocab_size: token ids of the target.
        banned: ids that the head never drafts.
    """

    def __init__(self, vocab_size: int, banned: tuple[int, ...] = ()) -> None:
        self.text: list[int] = []
        """What the target has read; the features follow from it."""
        self.calls: list[list[int]] = []
        """The tokens of each append."""
        self.rows: list[Row] = []
        self.bad_after = -1
        """Number of logits rows from which on they are NaN; -1 for never."""
        self.before: list[int] = []
        """What the target had read before the text."""
        self._vocab_size = vocab_size
        self._banned = banned
        self._said = 0

    def features(self) -> ScriptedFeatures:
        """The argument to pass to the lab in place of the target."""
        return ScriptedFeatures(lambda: torch.cat([features_of(self.before), features_of(self.text)]))

    def spec(self) -> ScriptedHead:
        """The argument to pass to the lab in place of the head."""
        return ScriptedHead(
            self._vocab_size, read_of, self._append, self._logits, self._truncate, lambda: len(self.rows)
        )

    def logits_after(self, text: list[int], drafts: list[int]) -> Tensor:
        """What the head says behind drafts that follow a text, `[vocab_size]`."""
        return self._masked(logits_of(state_after(text, drafts), self._vocab_size))

    def _append(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Check the form of the rows, remember them, and return what follows from those that each sees."""
        count, old = len(tokens), len(self.rows)
        shapes = [list(tensor.shape) for tensor in (hidden, tokens, positions, mask)]
        wanted = [[count, HIDDEN], [count], [count], [count, old + count]]
        if shapes != wanted or not count:
            raise AssertionError(f"append was given hidden, tokens, positions, mask of shapes {shapes}, not {wanted}")
        if mask.dtype != torch.bool or tokens.dtype != torch.int64 or positions.dtype != torch.int64:
            raise AssertionError(f"the mask is bool, tokens and positions are int64: got {mask.dtype}, {tokens.dtype}")
        self.calls.append(tokens.tolist())
        self.rows += [
            Row(tuple(h), int(t), int(p)) for h, t, p in zip(hidden.tolist(), tokens, positions, strict=True)
        ]  # fmt: skip
        states = []
        for row in range(count):
            seen = [self.rows[i] for i in mask[row].nonzero().flatten().tolist()]
            if not seen or seen[-1] is not self.rows[old + row]:
                raise AssertionError(f"row {row} must see itself, and no row behind it; its mask is {mask[row].int()}")
            states.append(state_of(seen))
        return torch.tensor(states, dtype=torch.float64)

    def _logits(self, hidden: Tensor) -> Tensor:
        """A row for each state."""
        rows = []
        for state in hidden.tolist():
            bad = self.bad_after >= 0 and self._said >= self.bad_after
            row = self._masked(logits_of(tuple(state), self._vocab_size))
            rows.append(row * torch.nan if bad else row)
            self._said += 1
        return torch.stack(rows)

    def _masked(self, row: Tensor) -> Tensor:
        row[list(self._banned)] = -torch.inf
        return row

    def _truncate(self, length: int) -> None:
        if not 0 <= length <= len(self.rows):
            raise AssertionError(f"the head was truncated to {length} rows; it has {len(self.rows)}")
        del self.rows[length:]
