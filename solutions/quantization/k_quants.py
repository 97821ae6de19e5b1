"""Task 13: Q4_K and Q6_K, the super-blocks of 256 weights that GGUF files hold."""

from __future__ import annotations

# BEGIN SOLUTION
from collections.abc import Callable, Iterator

# END SOLUTION
import torch
from torch import Tensor

from labkit.quantization_checks import check_finite, check_matrix

from .block_fit import fit_scale, fit_scale_min, nearest_codes, weighted_error

SUPER_BLOCK = 256
"""Weights that share the 16-bit scales; a row must hold a whole number of super-blocks."""

Q4_K_BYTES = 144
"""A super-block of Q4_K: d and dmin (fp16), 12 bytes of 6-bit numbers, 128 bytes of 4-bit codes; 4.5 bits a weight."""

Q6_K_BYTES = 210
"""A super-block of Q6_K: 128 and 64 bytes of codes, 16 int8 scales, d (fp16); 6.5625 bits a weight."""

LARGEST = 2.0**20
"""The largest magnitude of a weight; far above it the fp16 scales overflow."""

# BEGIN SOLUTION
# Weights whose search runs together: few enough for a processor's cache.
_WEIGHTS_AT_ONCE = 2**16
# END SOLUTION


def encode_q4_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize rows to Q4_K: value ≈ d · s · code − dmin · m, with an s and an m for each of 8 blocks of 32.

    The bytes of a super-block, where "low" and "high" are bits of a byte:

    - 0–1 d, 2–3 dmin: fp16, little-endian.
    - 4–15 the 6-bit s0 … s7 and m0 … m7: bytes 4–7 hold s0 … s3 and bytes 8–11 m0 … m3, each in the low 6 bits. Bytes
      12–15 hold the low 4 bits of s4 … s7 in their low half and those of m4 … m7 in their high half. The 2 bits that
      are left are the high bits of bytes 4–7 for s4 … s7, and of bytes 8–11 for m4 … m7.
    - 16–143 the codes 0 … 15: 32 bytes for every two blocks, the first block's in the low halves.

    Args:
        rows: `[rows, columns]`, finite floats within ±`LARGEST`; computed in float32.
        importance: of each column, `[columns]`, at least 0; None counts all columns alike, and so does all 0. Columns
            below a millionth of the mean count as much as that, so that blocks of them come out right, too.

    Returns:
        `[rows, columns / 256 · 144]` uint8. The error, weighted by importance, is in no super-block above that of the
        plain encoder: scale (high − low) / 15 and minimum −low of each block as in `fit_scale_min`, d and dmin the
        largest of them divided by 63, s and m the nearest, and the nearest codes for the scales as they are stored.

    Raises:
        ValueError: columns that 256 does not divide, rows that are no matrix of finite floats within ±`LARGEST`, or
            importance of another length, negative or not finite.

    Source: module section 4.2; the layout is GGUF's block_q4_K.
    """
    _check_rows(rows, importance)
    # BEGIN SOLUTION
    packed = []
    for values, weights in _super_blocks(rows, importance, 32):
        low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
        plain = _pack_q4(values, (high - low) / 15, -low)
        searched = _pack_q4(values, *fit_scale_min(values, weights))
        packed.append(_better(values, weights, plain, searched, decode_q4_k))
    return torch.cat(packed)
    # END SOLUTION


def decode_q4_k(packed: Tensor) -> Tensor:
    """The weights that bytes of Q4_K stand for, bit for bit as GGUF's readers compute them.

    Args:
        packed: `[rows, super-blocks · 144]` uint8.

    Returns:
        `[rows, super-blocks · 256]` float32.

    Raises:
        ValueError: no matrix of uint8, or rows that 144 does not divide.
    """
    _check_packed(packed, Q4_K_BYTES)
    # BEGIN SOLUTION
    blocks = packed.unflatten(-1, (-1, Q4_K_BYTES))
    d, dmin = blocks[..., :4].contiguous().view(torch.float16).float().unsqueeze(-2).split(1, -1)
    first, second, low = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    s = torch.cat((first & 63, low & 15 | first >> 6 << 4), -1).unsqueeze(-1)
    m = torch.cat((second & 63, low >> 4 | second >> 6 << 4), -1).unsqueeze(-1)
    codes = blocks[..., 16:].unflatten(-1, (4, 1, 32))
    codes = torch.cat((codes & 15, codes >> 4), -2).flatten(-3, -2)
    return (d * s * codes - dmin * m).flatten(1)
    # END SOLUTION


def encode_q6_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize rows to Q6_K: value ≈ d · s · (code − 32), with an s for each of 16 blocks of 16.

    The bytes of a super-block, whose 256 codes 0 … 63 are taken as two halves of four quarters of 32:

    - 0–127 the low 4 bits of the codes, 64 bytes for each half: quarters 0 and 1 in the low halves of the bytes,
      quarters 2 and 3 in the high ones.
    - 128–191 the high 2 bits, 32 bytes for each half: quarter 0 in the two lowest bits of each, quarter 3 in the
      two highest.
    - 192–207 s of each block: int8. 208–209 d: fp16, little-endian.

    Args:
        rows: as in `encode_q4_k`.
        importance: as in `encode_q4_k`.

    Returns:
        `[rows, columns / 256 · 210]` uint8. The error, weighted by importance, is in no super-block above that of the
        plain encoder: the scale that puts the largest magnitude of each block on the code −32 (so it has a sign), d
        the largest of them divided by −128, s the nearest, and the nearest codes for the scales as they are stored.

    Raises:
        ValueError: as `encode_q4_k`.

    Source: module section 4.2; the layout is GGUF's block_q6_K.
    """
    _check_rows(rows, importance)
    # BEGIN SOLUTION
    packed = []
    for values, weights in _super_blocks(rows, importance, 16):
        plain = _pack_q6(values, values.gather(-1, values.abs().argmax(-1, keepdim=True)) / -32)
        searched = _pack_q6(values, fit_scale(values, weights))
        packed.append(_better(values, weights, plain, searched, decode_q6_k))
    return torch.cat(packed)
    # END SOLUTION


def decode_q6_k(packed: Tensor) -> Tensor:
    """The weights that bytes of Q6_K stand for, bit for bit as GGUF's readers compute them.

    Args:
        packed: `[rows, super-blocks · 210]` uint8.

    Returns:
        `[rows, super-blocks · 256]` float32.

    Raises:
        ValueError: no matrix of uint8, or rows that 210 does not divide.
    """
    _check_packed(packed, Q6_K_BYTES)
    # BEGIN SOLUTION
    blocks = packed.unflatten(-1, (-1, Q6_K_BYTES))
    low = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.cat((low & 15, low >> 4), -1)
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (low | high << 4).view(torch.int8) - 32
    s = blocks[..., 192:208].view(torch.int8).unsqueeze(-1)
    d = blocks[..., 208:].contiguous().view(torch.float16).float().unsqueeze(-1)
    return (d * s * codes.flatten(-2).unflatten(-1, (16, 16))).flatten(1)
    # END SOLUTION


def _check_rows(rows: Tensor, importance: Tensor | None) -> None:
    """Refuses what no super-blocks can be made of."""
    check_matrix("rows", rows)
    columns = rows.shape[1]
    if columns % SUPER_BLOCK:
        raise ValueError(
            f"k-quants need rows of whole super-blocks of {SUPER_BLOCK}, got rows of {columns} columns; use a format "
            "of smaller blocks for this matrix, such as Q5_0 or Q8_0"
        )
    if (largest := float(rows.abs().max())) > LARGEST:
        raise ValueError(f"rows must lie within ±{LARGEST:.0f}, or fp16 scales overflow; the largest is {largest:.4g}")
    if importance is None:
        return
    check_finite("importance", importance)
    if importance.shape != (columns,):
        raise ValueError(f"importance must have one number for each of {columns} columns, got {list(importance.shape)}")
    if (least := float(importance.min())) < 0:
        raise ValueError(f"importance is a mean of squares and must not be negative, got {least:.4g}")


def _check_packed(packed: Tensor, size: int) -> None:
    """Refuses what are no whole super-blocks of `size` bytes."""
    if packed.ndim != 2 or packed.dtype != torch.uint8 or packed.shape[1] % size:
        raise ValueError(
            f"packed must be uint8 of shape [rows, a multiple of {size}], got {packed.dtype}, {list(packed.shape)}"
        )


# BEGIN SOLUTION
def _pack_q4(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Super-blocks `[rows, super-blocks, 144]` for scales and minima of their blocks, `[rows, super-blocks, 8, 1]`."""
    d, dmin = (scale.amax(-2, keepdim=True) / 63).half(), (minimum.amax(-2, keepdim=True) / 63).half()
    s, m = nearest_codes(scale, d.float(), 0.0, 0, 63), nearest_codes(minimum, dmin.float(), 0.0, 0, 63)
    codes = nearest_codes(values, d.float() * s, dmin.float() * m, 0, 15).to(torch.uint8)
    codes = codes[..., ::2, :] | codes[..., 1::2, :] << 4
    s, m = (numbers.to(torch.uint8).squeeze(-1) for numbers in (s, m))
    first = s[..., :4] | s[..., 4:] >> 4 << 6
    second = m[..., :4] | m[..., 4:] >> 4 << 6
    low = s[..., 4:] & 15 | m[..., 4:] << 4
    return torch.cat((_bytes(d), _bytes(dmin), first, second, low, codes.flatten(-2)), -1)


def _pack_q6(values: Tensor, scale: Tensor) -> Tensor:
    """Super-blocks `[rows, super-blocks, 210]` for scales of their blocks, `[rows, super-blocks, 16, 1]`."""
    d = (scale.gather(-2, scale.abs().argmax(-2, keepdim=True)) / -128).half()
    s = nearest_codes(scale, d.float(), 0.0, -128, 127)
    codes = nearest_codes(values, d.float() * s, 0.0, -32, 31) + 32
    quarters = codes.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
    low = quarters[..., :2, :] & 15 | quarters[..., 2:, :] << 4
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = (quarters >> 4 << shifts).sum(-2, dtype=torch.uint8)
    return torch.cat((low.flatten(-3), high.flatten(-2), _bytes(s.to(torch.int8)), _bytes(d)), -1)


def _bytes(numbers: Tensor) -> Tensor:
    """The bytes of each super-block's numbers."""
    return numbers.contiguous().view(torch.uint8).flatten(-2)


def _super_blocks(rows: Tensor, importance: Tensor | None, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows after the other as `[rows, super-blocks, blocks, values]`, with weights that broadcast to it."""
    columns = rows.shape[1]
    weights = torch.ones(columns, dtype=torch.float64) if importance is None else importance.double()
    mean = weights.mean()
    weights = (weights / mean).clamp(min=1e-6) if mean > 0 else torch.ones_like(weights)
    shape = (columns // SUPER_BLOCK, SUPER_BLOCK // block, block)
    for part in rows.split(max(1, _WEIGHTS_AT_ONCE // columns)):
        yield part.float().unflatten(-1, shape), weights.float().reshape(1, *shape)


def _better(
    values: Tensor, weights: Tensor, plain: Tensor, searched: Tensor, decode: Callable[[Tensor], Tensor]
) -> Tensor:
    """Of two encodings the one with the smaller error, for each super-block; rows of bytes."""
    errors = []
    for packed in (plain, searched):
        decoded = decode(packed.flatten(1)).reshape(values.shape)
        errors.append(weighted_error(values.flatten(-2), decoded.flatten(-2), weights.flatten(-2)))
    return torch.where(errors[1] < errors[0], searched, plain).flatten(1)


# END SOLUTION
