"""What a scheduler decides for one step, as a value: which tokens are computed, and which blocks are copied before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Tokens of one request that a step computes: a whole prompt, a piece of one, or a single new token.

    Args:
        request_id: whose tokens they are.
        start: position of the first of them. What comes before lies in the blocks already.
        tokens: their ids, at least one.
        blocks: the request's block table, with room for these tokens and no block more.
        gives_token: whether the last of them is the newest token that is known, so that its logits give the next.
    """

    request_id: int
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    gives_token: bool


@dataclass(frozen=True)
class StepPlan:
    """One step. First blocks are copied out to host memory, then others back in, then one pass computes all chunks.

    Args:
        chunks: at most one for each request; none if there is nothing to compute.
        swap_out: pairs (block, host block).
        swap_in: pairs (host block, block).
    """

    chunks: tuple[Chunk, ...]
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
