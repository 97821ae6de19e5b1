"""How often each block was drawn, instead of which; and an interval from sorted numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from labkit.evaluation import Interval


def split_blocks(losses: Sequence[Tensor], block_size: int) -> list[Tensor]:
    """Slices at multiples of the block size."""
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"block_size must be an int of at least 1, got {block_size!r}")
    blocks = []
    for document in _finite(losses):
        for start in range(0, len(document), block_size):
            blocks.append(document[start : start + block_size])
    return blocks


def paired_bootstrap(
    first: Sequence[Tensor], second: Sequence[Tensor], uniforms: Tensor, confidence: float = 0.95
) -> Interval:
    """One matrix of counts for both sides."""
    ones, others = _finite(first), _finite(second)
    if [len(a) for a in ones] != [len(b) for b in others]:
        raise ValueError("the blocks of the two models hold different tokens")
    counts = _counts(uniforms, len(ones))
    means = _means(others, counts) - _means(ones, counts)
    return _ends(_mean(others) - _mean(ones), means, confidence)


def unpaired_bootstrap(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    uniforms_first: Tensor,
    uniforms_second: Tensor,
    confidence: float = 0.95,
) -> Interval:
    """A matrix of counts for each side."""
    ones, others = _finite(first), _finite(second)
    mine, yours = _counts(uniforms_first, len(ones)), _counts(uniforms_second, len(others))
    if len(mine) != len(yours):
        raise ValueError(f"{len(mine)} resamples of the one and {len(yours)} of the other")
    return _ends(_mean(others) - _mean(ones), _means(others, yours) - _means(ones, mine), confidence)


def fair_pairs(bits_per_weight: Mapping[str, float], baseline: str, tolerance: float = 0.1) -> list[tuple[str, str]]:
    """All combinations, filtered."""
    if baseline not in bits_per_weight:
        raise ValueError(f"no method is called {baseline!r}")
    if any(not bits > 0 for bits in bits_per_weight.values()) or not tolerance >= 0:
        raise ValueError(f"bits must be above 0 and the tolerance at least 0, got {bits_per_weight} and {tolerance}")
    rest = {name: bits for name, bits in bits_per_weight.items() if name != baseline}
    equal = [(a, b) for a, b in combinations(rest, 2) if -tolerance <= rest[a] - rest[b] <= tolerance]
    return [*((baseline, name) for name in rest), *equal]


def _finite(losses: Sequence[Tensor]) -> list[Tensor]:
    if not losses or not all(part.numel() and part.isfinite().all() for part in losses):
        raise ValueError("losses must hold finite numbers")
    return [part.double() for part in losses]


def _counts(uniforms: Tensor, blocks: int) -> Tensor:
    if blocks < 2 or uniforms.dim() != 2 or uniforms.shape[1] != blocks or not len(uniforms):
        raise ValueError(f"uniforms must be [resamples, blocks] for {blocks} blocks, got {list(uniforms.shape)}")
    if not (uniforms.min() >= 0 and uniforms.max() < 1):
        raise ValueError("uniforms must be from 0 to below 1")
    counts = torch.zeros(len(uniforms), blocks, dtype=torch.float64)
    edges = torch.arange(1, blocks + 1, dtype=torch.float64)
    drawn = torch.searchsorted(edges, uniforms.double() * blocks, right=True).clamp(max=blocks - 1)
    return counts.scatter_add(1, drawn, torch.ones_like(counts))


def _means(blocks: Sequence[Tensor], counts: Tensor) -> Tensor:
    sums = torch.tensor([math.fsum(block.tolist()) for block in blocks], dtype=torch.float64)
    sizes = torch.tensor([float(len(block)) for block in blocks], dtype=torch.float64)
    return (counts @ sums) / (counts @ sizes)


def _mean(blocks: Sequence[Tensor]) -> float:
    return sum(float(block.sum()) for block in blocks) / sum(len(block) for block in blocks)


def _ends(estimate: float, means: Tensor, confidence: float) -> Interval:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    ordered = sorted(means.tolist())

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = min(int(place), len(ordered) - 1)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return Interval(estimate, at((1 - confidence) / 2), at((1 + confidence) / 2))
