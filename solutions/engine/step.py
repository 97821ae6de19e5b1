"""What the scheduler decides for one step, as a value that runner, tests and simulator read alike."""

from __future__ import annotations

from dataclasses import dataclass

from .kv_manager import Move
from .request import Request


@dataclass(frozen=True)
class Work:
    """The tokens of one request that a step computes.

    Args:
        request: whose they are.
        start: position of the first of them; all before it are computed.
        tokens: known tokens, then drafts.
        num_drafts: how many of them are drafts.
        slots: where the keys and values of these tokens go, one slot each.
        blocks: the request's block table, as far as these tokens reach.
        gives_token: whether the logits after the newest known token, and after each draft, are wanted.
    """

    request: Request
    start: int
    tokens: tuple[int, ...]
    num_drafts: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    gives_token: bool

    @property
    def end(self) -> int:
        """Position behind the last of the tokens."""
        return self.start + len(self.tokens)

    @property
    def drafts(self) -> tuple[int, ...]:
        """Those of the tokens that are drafts."""
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @property
    def num_rows(self) -> int:
        """Logits that are wanted."""
        return self.num_drafts + 1 if self.gives_token else 0


@dataclass(frozen=True)
class Step:
    """One step: first the moves, in order, then one pass over all the work.

    Args:
        work: at most one for each request.
        moves: of blocks.
        preempted: requests that lost their blocks in this step.
        open_blocks: those in which a text ends before the pass, if the memory wants to know; see `KiviPool`.
    """

    work: tuple[Work, ...]
    moves: tuple[Move, ...] = ()
    preempted: tuple[Request, ...] = ()
    open_blocks: frozenset[int] = frozenset()

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(len(work.tokens) for work in self.work)
