"""NF4 block by block: quantiles from the standard library, and the nearest level by comparing all distances."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from labkit.float_formats import Nf4Tensor, QuantizedAbsmax

HIGHEST = 1 - (1 / 32 + 1 / 30) / 2


def nf4_levels() -> Tensor:
    """Each level as the quantile of its own probability."""
    quantile = NormalDist().inv_cdf
    up = [quantile(0.5 + (HIGHEST - 0.5) * step / 8) for step in range(1, 9)]
    down = [quantile(0.5 - (HIGHEST - 0.5) * step / 7) for step in range(7, 0, -1)]
    return torch.tensor([level / up[-1] for level in [*down, 0.0, *up]], dtype=torch.float64).float()


def quantize_nf4(x: Tensor, block_size: int = 64, *, double_quantization: bool = False) -> Nf4Tensor:
    """Level by level: a later one takes over where it is nearer."""
    _positive(block_size)
    values = _checked(x).flatten()
    levels = nf4_levels()
    absmax, codes = [], []
    for block in values.split(block_size):
        largest = block.abs().max()
        absmax.append(largest)
        if not largest:
            codes.append(torch.full_like(block, 7, dtype=torch.uint8))
            continue
        codes.append(((block / largest)[:, None] - levels).abs().argmin(1).to(torch.uint8))
    scales = torch.stack(absmax)
    return Nf4Tensor(
        torch.cat(codes).view(x.shape), quantize_absmax(scales) if double_quantization else scales, block_size
    )


def dequantize_nf4(q: Nf4Tensor) -> Tensor:
    """Block by block."""
    absmax = q.absmax if isinstance(q.absmax, Tensor) else dequantize_absmax(q.absmax)
    levels = nf4_levels()
    blocks = q.codes.flatten().split(q.block_size)
    parts = [levels[block.long()] * scale for block, scale in zip(blocks, absmax, strict=True)]
    return torch.cat(parts).view(q.codes.shape)


def quantize_absmax(absmax: Tensor, block_size: int = 256) -> QuantizedAbsmax:
    """In float64, block by block."""
    _positive(block_size)
    values = _checked(absmax).double()
    if values.dim() != 1 or (values < 0).any():
        raise ValueError("absmax must be a row of numbers that are not negative")
    mean = values.mean().float()
    scales, codes = [], []
    for block in (values - mean).split(block_size):
        # Deviations of equal numbers are at most a rounding of the mean.
        scale = float(block.abs().max()) / 127 or 1.0
        scales.append(scale)
        codes.append((block / scale).round().to(torch.int8))
    return QuantizedAbsmax(torch.cat(codes), torch.tensor(scales, dtype=torch.float32), mean, block_size)


def dequantize_absmax(q: QuantizedAbsmax) -> Tensor:
    """mean + scale · code, not below 0."""
    which = torch.arange(len(q.codes)) // q.block_size
    return torch.relu(q.codes.float() * q.scale[which] + q.mean)


def nf4_bits_per_weight(block_size: int = 64, absmax_block_size: int | None = None) -> float:
    """Counted over a whole number of blocks of scales."""
    _positive(block_size)
    if absmax_block_size is None:
        return (4 * block_size + 32) / block_size
    _positive(absmax_block_size)
    return (4 * block_size * absmax_block_size + 8 * absmax_block_size + 32) / (block_size * absmax_block_size)


def _positive(size: int) -> None:
    if size < 1:
        raise ValueError(f"block_size and absmax_block_size must be at least 1, got {size}")


def _checked(x: Tensor) -> Tensor:
    if not x.is_floating_point() or not x.numel():
        raise ValueError(f"expected floating numbers, got {x.numel()} of {x.dtype}")
    for place in torch.isfinite(x.float()).logical_not().nonzero().tolist():
        raise ValueError(f"the number at {place} is not finite")
    return x.float()
