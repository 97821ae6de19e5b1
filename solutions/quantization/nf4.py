"""Task 7: NormalFloat of 4 bits, whose levels lie where normal weights do, and scales that are quantized themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.checks import check_count
from labkit.float_formats import Nf4Tensor, QuantizedAbsmax

OUTERMOST = 0.9677083
"""Probability below the highest level, 1 - (1/32 + 1/30) / 2 to the digits that were published: beyond it lies half of
one of 16 equal shares, averaged with half of one of 15."""


def nf4_levels() -> Tensor:
    """The 16 levels: quantiles of the normal distribution, scaled to [-1, 1], with an exact 0 among them.

    With as many positive levels as negative ones, none of the 16 would be 0. So the way from the middle of the
    distribution, probability 1/2, up to `OUTERMOST` is divided into 8 equal steps of probability, and the way down to
    1 - `OUTERMOST` into 7.

    Returns:
        float32, `[16]`, increasing; the first is -1, number 7 is 0, the last is 1.

    Source: QLoRA (2305.14314), appendix E.
    """
    # BEGIN SOLUTION
    # Probabilities in float32, from the outside in, are how the published numbers came about. Others differ by 3e-7.
    positive = _normal_quantiles(torch.linspace(OUTERMOST, 0.5, 9)[:-1])
    negative = -_normal_quantiles(torch.linspace(OUTERMOST, 0.5, 8)[:-1])
    return torch.cat([negative, torch.zeros(1), positive.flip(0)]) / positive[0]
    # END SOLUTION


def quantize_nf4(x: Tensor, block_size: int = 64, *, double_quantization: bool = False) -> Nf4Tensor:
    """Each value by the level nearest to value / absmax of its block.

    Args:
        x: a floating tensor of any shape with at least one value; it is worked on in float32. Blocks are of neighbours
            in row-by-row order, whatever the strides; the last one may be shorter.
        block_size: values that share an absmax.
        double_quantization: store the absmax in 8 bits, too. The codes are the same either way.

    Returns:
        A value of 0 has code 7, in a block of zeros as well: in 8 bits its absmax may come back above 0.

    Raises:
        ValueError: no value, no floating dtype, a value that float32 can't hold or that is not finite, or a bad size.

    Source: QLoRA (2305.14314), section 3; module section 4.3.
    """
    check_count("block_size", block_size, 1)
    values = _finite("x", x).reshape(-1)
    # BEGIN SOLUTION
    blocks = torch.nn.functional.pad(values, (0, -len(values) % block_size)).reshape(-1, block_size)
    absmax = blocks.abs().amax(1)
    # A block of zeros has no scale, and needs none: 0 is a level.
    ratios = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
    levels = nf4_levels().to(x.device)
    codes = torch.bucketize(ratios, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    codes = codes.reshape(-1)[: len(values)].reshape(x.shape)
    return Nf4Tensor(codes, quantize_absmax(absmax) if double_quantization else absmax, block_size)
    # END SOLUTION


def dequantize_nf4(q: Nf4Tensor) -> Tensor:
    """The values that the codes stand for.

    Returns:
        float32, of the codes' shape.
    """
    # BEGIN SOLUTION
    absmax = dequantize_absmax(q.absmax) if isinstance(q.absmax, QuantizedAbsmax) else q.absmax
    values = nf4_levels().to(q.codes.device)[q.codes.reshape(-1).int()]
    return (values * absmax.repeat_interleave(q.block_size)[: len(values)]).reshape(q.codes.shape)
    # END SOLUTION


def quantize_absmax(absmax: Tensor, block_size: int = 256) -> QuantizedAbsmax:
    """Scales in 8 bits: minus their mean, then symmetric with max|·| / 127 for each block, rounded half to even.

    All scales are positive, so without the mean half of the codes would lie idle. (QLoRA takes floats of 8 bits
    here; integers serve as well, since the scales of one matrix are close to each other.)

    Args:
        absmax: at least one, none negative, `[blocks]`.
        block_size: scales that share a scale of their own.

    Returns:
        Codes from -127 to 127. A block whose scales all equal the mean has the codes 0, and any scale.

    Raises:
        ValueError: no matrix row, a scale that is negative or not finite, or a bad size.

    Source: QLoRA (2305.14314), section 3.
    """
    check_count("block_size", block_size, 1)
    values = _finite("absmax", absmax)
    if values.ndim != 1 or bool((values < 0).any()):
        raise ValueError(
            f"absmax must be one row of numbers of at least 0, got shape {list(absmax.shape)} and least "
            f"{float(values.min())}"
        )
    # BEGIN SOLUTION
    mean = values.double().mean().float()
    centred = torch.nn.functional.pad(values - mean, (0, -len(values) % block_size)).reshape(-1, block_size)
    scale = centred.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (centred / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return QuantizedAbsmax(codes.reshape(-1)[: len(values)], scale, mean, block_size)
    # END SOLUTION


def dequantize_absmax(q: QuantizedAbsmax) -> Tensor:
    """The scales again; none is negative, for a negative one would turn the signs of its block.

    Returns:
        float32, `[blocks]`.
    """
    # BEGIN SOLUTION
    scale = q.scale.repeat_interleave(q.block_size)[: len(q.codes)]
    return (q.mean + scale * q.codes).clamp(min=0)
    # END SOLUTION


def nf4_bits_per_weight(block_size: int = 64, absmax_block_size: int | None = None) -> float:
    """Bits that a value takes in the end, its share of the scales counted in.

    Args:
        block_size: values that share an absmax.
        absmax_block_size: with double quantization the absmax that share a scale; None: each is a float32. The one
            mean of a matrix is not counted.

    Raises:
        ValueError: a size that is no int of at least 1.
    """
    check_count("block_size", block_size, 1)
    if absmax_block_size is not None:
        check_count("absmax_block_size", absmax_block_size, 1)
    # BEGIN SOLUTION
    absmax_bits = 32 if absmax_block_size is None else 8 + 32 / absmax_block_size
    return 4 + absmax_bits / block_size
    # END SOLUTION


def _finite(name: str, values: Tensor) -> Tensor:
    """The values in float32.

    Raises:
        ValueError: there is none, or one is not finite there.
    """
    if not values.is_floating_point() or values.numel() == 0:
        raise ValueError(f"{name} must hold at least one floating number, got {values.numel()} of {values.dtype}")
    numbers = values.float()
    if not bool(numbers.isfinite().all()):
        bad = numbers.isfinite().logical_not().nonzero()[0].tolist()
        raise ValueError(f"{name} must be finite in float32, got {values[tuple(bad)].item()} at {bad}; mend it first")
    return numbers


# BEGIN SOLUTION
def _normal_quantiles(probabilities: Tensor) -> Tensor:
    """Where the normal distribution has these shares below it, in float32."""
    return torch.special.ndtri(probabilities.double()).float()


# END SOLUTION
