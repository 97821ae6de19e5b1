"""Task 9: comparing two models on the same tokens, and how sure the difference is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.evaluation import Interval

from .perplexity import check_losses


def split_blocks(losses: Sequence[Tensor], block_size: int) -> list[Tensor]:
    """Cut documents into blocks of neighbouring tokens, the units that a bootstrap draws.

    Losses of neighbouring tokens are alike: a hard passage is hard for twenty tokens. Whoever draws single tokens
    takes them for twenty independent witnesses. Blocks longer than a passage are nearly independent.

    Args:
        losses: one tensor `[tokens]` for each document.
        block_size: tokens of a block, at least 1. The last block of a document may be shorter; none holds tokens of
            two documents.

    Returns:
        All blocks in order.

    Raises:
        ValueError: no losses, one that isn't finite, or `block_size` no int of at least 1.
    """
    every = check_losses("losses", losses)
    check_count("block_size", block_size, 1)
    # BEGIN SOLUTION
    return [block for document in every for block in document.split(block_size)]
    # END SOLUTION


def paired_bootstrap(
    first: Sequence[Tensor], second: Sequence[Tensor], uniforms: Tensor, confidence: float = 0.95
) -> Interval:
    """The mean difference of two models' losses on the same tokens, with its percentile interval.

    A resample draws as many blocks as there are, with replacement, and takes *both* models' losses on them: what makes
    a passage hard for both cancels. Its statistic is the sum of all drawn differences by the number of drawn tokens.

    Args:
        first: blocks of the one model's losses, at least two.
        second: the other's, of the same tokens block by block.
        uniforms: `[resamples, blocks]`, each at least 0 and below 1; draw j of a resample is block ⌊u · blocks⌋.
        confidence: of the interval, above 0 and below 1.

    Returns:
        second - first in nats a token: the estimate of all tokens as they are, and the quantiles (1 - confidence) / 2
        and (1 + confidence) / 2 of the resamples, interpolated linearly. exp of it is the ratio of perplexities.

    Raises:
        ValueError: blocks that don't match, fewer than two of them, losses that aren't finite, or numbers out of range.

    Source: Efron 1979; Koehn 2004 for its paired use; module section 4.5.
    """
    ones, others = check_losses("first", first), check_losses("second", second)
    if [len(block) for block in ones] != [len(block) for block in others]:
        raise ValueError(
            f"first and second must hold the same tokens block by block, got blocks of {_sizes(ones)} and "
            f"{_sizes(others)} tokens; compare models on different texts by unpaired_bootstrap"
        )
    uniforms = _check_uniforms("uniforms", uniforms, len(ones))
    _check_confidence(confidence)
    # BEGIN SOLUTION
    differences = [other - one for one, other in zip(ones, others, strict=True)]
    return _interval(_mean(differences), _resampled_means(differences, uniforms), confidence)
    # END SOLUTION


def unpaired_bootstrap(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    uniforms_first: Tensor,
    uniforms_second: Tensor,
    confidence: float = 0.95,
) -> Interval:
    """The same difference, for models that were measured on different texts: each side draws its own blocks.

    Args:
        first: blocks of the one model's losses, at least two.
        second: the other's; their number and sizes may differ.
        uniforms_first: `[resamples, blocks of first]`.
        uniforms_second: `[resamples, blocks of second]`.
        confidence: of the interval.

    Returns:
        As `paired_bootstrap`. On the same texts it is right, too, but wider: how hard the texts are counts twice
        instead of not at all.

    Raises:
        ValueError: as for `paired_bootstrap`, and different numbers of resamples.
    """
    ones, others = check_losses("first", first), check_losses("second", second)
    uniforms_first = _check_uniforms("uniforms_first", uniforms_first, len(ones))
    uniforms_second = _check_uniforms("uniforms_second", uniforms_second, len(others))
    if len(uniforms_first) != len(uniforms_second):
        raise ValueError(
            f"both sides need the same number of resamples, got {len(uniforms_first)} and {len(uniforms_second)}"
        )
    _check_confidence(confidence)
    # BEGIN SOLUTION
    resampled = _resampled_means(others, uniforms_second) - _resampled_means(ones, uniforms_first)
    return _interval(_mean(others) - _mean(ones), resampled, confidence)
    # END SOLUTION


def fair_pairs(bits_per_weight: Mapping[str, float], baseline: str, tolerance: float = 0.1) -> list[tuple[str, str]]:
    """Which methods a table should compare: each with full precision, and those of equal size with one another.

    A method of 4.5 bits that beats one of 4.1 has shown nothing about methods.

    Args:
        bits_per_weight: of each method, scales and zero points included; above 0.
        baseline: the name of the full-precision model among them.
        tolerance: how far two sizes may be apart and count as equal, in bits, at least 0.

    Returns:
        Pairs of names `(first, second)`: first the baseline with every other method, then all pairs of other methods
        of equal size; all in the order of `bits_per_weight`.

    Raises:
        ValueError: an unknown baseline, or a number out of range.

    Source: module section 4.5.
    """
    if baseline not in bits_per_weight:
        raise ValueError(f"baseline must be one of {', '.join(bits_per_weight)}, got {baseline!r}")
    for name, bits in bits_per_weight.items():
        if not 0 < bits < math.inf:
            raise ValueError(f"bits per weight must be finite and above 0, got {bits!r} for {name}")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be finite and at least 0, got {tolerance!r}")
    # BEGIN SOLUTION
    methods = [name for name in bits_per_weight if name != baseline]
    pairs = [(baseline, name) for name in methods]
    for index, first in enumerate(methods):
        for second in methods[index + 1 :]:
            if abs(bits_per_weight[first] - bits_per_weight[second]) <= tolerance:
                pairs.append((first, second))
    return pairs
    # END SOLUTION


# BEGIN SOLUTION
def _mean(blocks: Sequence[Tensor]) -> float:
    return float(torch.cat(list(blocks)).mean())


def _resampled_means(blocks: Sequence[Tensor], uniforms: Tensor) -> Tensor:
    """The mean over tokens of each resample, `[resamples]`."""
    sums = torch.stack([block.sum() for block in blocks])
    sizes = torch.tensor([len(block) for block in blocks], dtype=torch.float64)
    # Below 1 a float may still round up to the number of blocks.
    drawn = (uniforms * len(blocks)).long().clamp(max=len(blocks) - 1)
    return sums[drawn].sum(1) / sizes[drawn].sum(1)


def _interval(estimate: float, resampled: Tensor, confidence: float) -> Interval:
    ends = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = resampled.quantile(ends).tolist()
    return Interval(estimate, low, high)


# END SOLUTION


def _sizes(blocks: Sequence[Tensor]) -> str:
    shown = [str(len(block)) for block in blocks[:5]]
    return ", ".join(shown + ["…"] * (len(blocks) > 5))


def _check_uniforms(name: str, uniforms: Tensor, num_blocks: int) -> Tensor:
    if num_blocks < 2:
        raise ValueError("a bootstrap needs at least two blocks; one says nothing about how blocks differ")
    if not isinstance(uniforms, Tensor) or uniforms.dim() != 2 or uniforms.shape[1] != num_blocks or not len(uniforms):
        given = list(uniforms.shape) if isinstance(uniforms, Tensor) else type(uniforms).__name__
        raise ValueError(f"{name} must have shape [resamples, {num_blocks}], one number for each block, got {given}")
    if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError(f"{name} must be at least 0 and below 1")
    return uniforms.double()


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be above 0 and below 1, got {confidence!r}")
