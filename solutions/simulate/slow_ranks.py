"""Accelerators that work as one wait for the slowest of them: stragglers, and experts that are in fashion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.checks import check_count
from solutions.engine.step import Step

from .step_time import StepTimeModel

Placement = tuple[tuple[int, ...], ...]
"""For each rank the experts that it holds; one that several hold shares its tokens evenly among them."""


@dataclass(frozen=True)
class TensorParallel:
    """Ranks that each compute a part of every layer; the step is done when the last of them is.

    Args:
        base: the time with all ranks at full speed.
        speeds: of each rank, 1 for full speed.

    Raises:
        ValueError: no rank, or a speed that isn't positive.

    Source: module section 6, step 7.
    """

    base: StepTimeModel
    speeds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.speeds or not all(speed > 0 for speed in self.speeds):
            raise ValueError(f"speeds must be positive numbers, one for each rank, got {self.speeds}")

    def __call__(self, step: Step) -> float:
        return self.base(step) / min(self.speeds)


@dataclass(frozen=True)
class ExpertParallel:
    """Ranks that hold different experts; tokens go where their experts are.

    Args:
        base: the time with tokens spread evenly.
        share: of that time that the experts take, 0 to 1.
        imbalance: load of the busiest rank over the mean; see `imbalance`.

    Raises:
        ValueError: a share outside 0 to 1, or an imbalance below 1.

    Source: module sections 2.5 and 6, step 7.
    """

    base: StepTimeModel
    share: float
    imbalance: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie between 0 and 1, got {self.share}")
        if not self.imbalance >= 1:
            raise ValueError(f"imbalance must be at least 1, since no mean exceeds its largest, got {self.imbalance}")

    def __call__(self, step: Step) -> float:
        return self.base(step) * (1 - self.share + self.share * self.imbalance)


def imbalance(popularity: Sequence[float], placement: Placement) -> float:
    """Load of the busiest rank over the mean, for many tokens.

    Args:
        popularity: of each expert, in any unit.
        placement: who holds what.

    Raises:
        ValueError: an expert that nobody holds, or one that doesn't exist.
    """
    copies = [sum(held.count(expert) for held in placement) for expert in range(len(popularity))]
    if 0 in copies or any(not 0 <= expert < len(popularity) for held in placement for expert in held):
        raise ValueError(f"each of the {len(popularity)} experts must lie on a rank, and no others; got {placement}")
    loads = [sum(popularity[expert] / copies[expert] for expert in held) for held in placement]
    return max(loads) * len(loads) / sum(popularity)


def in_order(num_experts: int, num_ranks: int) -> Placement:
    """The first experts on the first rank, and so on; who is popular plays no part.

    Raises:
        ValueError: ranks that don't divide the experts.
    """
    check_count("num_ranks", num_ranks, 1)
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts don't divide among {num_ranks} ranks")
    each = num_experts // num_ranks
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(num_ranks))


def balanced(popularity: Sequence[float], num_ranks: int, spare: int = 0) -> Placement:
    """Copies of the popular experts, and the heaviest first to the rank with the least load.

    Args:
        popularity: of each expert.
        num_ranks: ranks, all with the same number of places.
        spare: places beyond one for each expert, to be filled with copies.

    Raises:
        ValueError: places that don't divide among the ranks.

    Source: the idea of DeepSeek-V3's redundant experts (2412.19437, section 3.4).
    """
    places = len(popularity) + spare
    if places % num_ranks:
        raise ValueError(f"{places} places don't divide among {num_ranks} ranks")
    copies = [1] * len(popularity)
    for _ in range(spare):
        copies[max(range(len(copies)), key=lambda expert: popularity[expert] / copies[expert])] += 1
    loads, held = [0.0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    pieces = [
        (popularity[expert] / copies[expert], expert) for expert in range(len(copies)) for _ in range(copies[expert])
    ]
    for load, expert in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        rank = min((r for r in range(num_ranks) if len(held[r]) < places // num_ranks), key=lambda r: loads[r])
        held[rank].append(expert)
        loads[rank] += load
    return tuple(map(tuple, held))
