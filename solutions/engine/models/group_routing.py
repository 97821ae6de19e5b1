"""DeepSeek's choice of experts: the best of the best groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.checks import check_count

from .experts import Route


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen.

    Args:
        num_experts: in a layer.
        top_k: experts of a token.
        num_groups: groups of as many experts each.
        top_groups: groups among which a token's experts are.
        sigmoid: V3: scores are sigmoids, a learned bias helps to choose and is no part of the shares, and a group is
            as good as its two best. V2: scores are a softmax, and a group is as good as its best.
        normalized: whether the shares are made to sum to 1 before they are scaled.
        scale: factor on the shares.

    Raises:
        ValueError: counts that don't fit together.

    Source: DeepSeek-AI 2024 (2405.04434, 2412.19437).
    """

    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    sigmoid: bool = False
    normalized: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups"):
            check_count(name, getattr(self, name), 1)
        if self.num_experts % self.num_groups or self.num_experts // self.num_groups < self.best_of_group:
            raise ValueError(
                f"num_groups must divide the {self.num_experts} experts into groups of at least {self.best_of_group}, "
                f"got {self.num_groups}"
            )
        if self.top_groups > self.num_groups or self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ValueError(
                f"{self.top_groups} of {self.num_groups} groups do not have the {self.top_k} experts that a token gets"
            )

    @property
    def best_of_group(self) -> int:
        """How many of its experts a group is judged by; one where there is nothing to judge."""
        return 2 if self.sigmoid and self.num_groups > 1 else 1


def router(routing: Routing, gate: Tensor, bias: Tensor | None) -> Route:
    """Chooses experts in at least float32.

    Args:
        routing: how.
        gate: `[num_experts, hidden]`.
        bias: on the scores while choosing, `[num_experts]`; None for V2.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    squash: Callable[[Tensor], Tensor] = torch.sigmoid if routing.sigmoid else lambda scores: scores.softmax(dim=-1)

    def route(hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = squash(F.linear(hidden.to(wide), gate.to(wide)))
        ranked = scores if bias is None else scores + bias
        if routing.num_groups > 1:
            groups = ranked.unflatten(-1, (routing.num_groups, -1))
            strength = groups.topk(routing.best_of_group, dim=-1).values.sum(dim=-1)
            best = strength.topk(routing.top_groups, dim=-1).indices
            out = torch.ones_like(strength, dtype=torch.bool).scatter(-1, best, False)
            ranked = groups.masked_fill(out[..., None], -torch.inf).flatten(-2)
        experts = ranked.topk(routing.top_k, dim=-1).indices
        shares = scores.gather(-1, experts)
        if routing.normalized:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, shares * routing.scale

    return route
