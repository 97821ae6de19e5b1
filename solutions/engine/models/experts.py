"""A feed-forward part made of experts, of which a router gives each token a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .blocks import FeedForward
from .parts import Part

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From hidden states `[tokens, hidden]` to the experts of each token, int64 `[tokens, top_k]`, and their shares."""


class Experts(Part):
    """The sum of what a token's experts make of it, each by its share.

    Tokens of one expert go through it together, so that its weights are read once; an expert without tokens costs
    nothing.

    Args:
        route: who gets what.
        experts: in the order of the router's numbers.
        shared: computed for every token besides; None if there is none.

    Source: Shazeer et al. 2017 (1701.06538); Jiang et al. 2024 (2401.04088).
    """

    reads_back = True

    def __init__(self, route: Route, experts: Sequence[FeedForward], shared: FeedForward | None = None) -> None:
        self._route = route
        self._experts = list(experts)
        self._shared = shared

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        chosen, shares = self._route(hidden)
        out = torch.zeros_like(hidden) if self._shared is None else self._shared(hidden)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            made = self._experts[expert](hidden[rows]) * shares[rows, places, None]
            out.index_add_(0, rows, made.to(out.dtype))
        return out
