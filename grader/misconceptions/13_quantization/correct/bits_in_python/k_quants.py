"""Super-block after super-block: fields are lists of numbers, bytes are made of strings of bits by struct."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from .block_fit import fit_scale, fit_scale_min, nearest_codes


def encode_q4_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """One super-block at a time."""
    return _encode(rows, importance, _q4, _read_q4)


def encode_q6_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """One super-block at a time."""
    return _encode(rows, importance, _q6, _read_q6)


def decode_q4_k(packed: Tensor) -> Tensor:
    """One super-block at a time."""
    return _decode(packed, 144, _read_q4)


def decode_q6_k(packed: Tensor) -> Tensor:
    """One super-block at a time."""
    return _decode(packed, 210, _read_q6)


def _encode(rows, importance, write, read):  # type: ignore[no-untyped-def]
    if rows.ndim != 2 or rows.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"rows must be a matrix of floats, got {rows.dtype} of shape {tuple(rows.shape)}")
    width = rows.shape[1]
    if width % 256:
        raise ValueError(f"{width} columns are no whole number of super-blocks of 256")
    if not all(math.isfinite(x) and abs(x) <= 2**20 for x in (float(rows.min()), float(rows.max()))):
        raise ValueError("rows hold NaN, infinity or weights beyond 2^20")
    importance = torch.ones(width) if importance is None else importance
    if importance.shape != (width,) or not all(math.isfinite(x) and x >= 0 for x in importance.tolist()):
        raise ValueError(f"importance must be {width} finite numbers of at least 0, not {len(importance)} of any kind")
    importance = importance.double() / (importance.double().mean() or 1.0)
    importance = torch.where(importance < 1e-6, 1e-6, importance).float()
    lines = []
    for row in rows.float():
        line = b""
        for values, weights in zip(row.split(256), importance.split(256), strict=True):
            candidates = write(values, weights)
            line += min(candidates, key=lambda packed, x=values, w=weights: _loss(read(packed), x, w))
        lines.append(list(line))
    return torch.tensor(lines, dtype=torch.uint8)


def _loss(decoded: list[float], values: Tensor, weights: Tensor) -> float:
    return float((weights.double() * (torch.tensor(decoded).double() - values.double()) ** 2).sum())


def _q4(values: Tensor, weights: Tensor) -> list[bytes]:
    blocks, counts = values.view(8, 32), weights.view(8, 32)
    low = [min(0.0, float(block.min())) for block in blocks]
    high = [max(0.0, float(block.max())) for block in blocks]
    plain = [(b - a) / 15 for a, b in zip(low, high, strict=True)], [-a for a in low]
    scale, minimum = fit_scale_min(blocks, counts)
    found = []
    for scales, minima in (plain, (scale.flatten().tolist(), minimum.flatten().tolist())):
        d, dmin = _half(max(scales) / 63), _half(max(minima) / 63)
        s = [min(63, round(x / d)) if d else 0 for x in scales]
        m = [min(63, round(x / dmin)) if dmin else 0 for x in minima]
        steps = torch.tensor([d * x for x in s]).view(8, 1)
        codes = nearest_codes(blocks, steps, torch.tensor([dmin * x for x in m]).view(8, 1), 0, 15).int().tolist()
        small = [s[i] | s[i + 4] >> 4 << 6 for i in range(4)] + [m[i] | m[i + 4] >> 4 << 6 for i in range(4)]
        small += [s[i + 4] & 15 | (m[i + 4] & 15) << 4 for i in range(4)]
        nibbles = [codes[2 * i][j] | codes[2 * i + 1][j] << 4 for i in range(4) for j in range(32)]
        found.append(struct.pack("<ee140B", d, dmin, *small, *nibbles))
    return found


def _read_q4(packed: bytes) -> list[float]:
    d, dmin, *numbers = struct.unpack("<ee140B", packed)
    bits = "".join(f"{number:08b}"[::-1] for number in numbers[:12])
    values = []
    for block in range(8):
        if block < 4:
            s, m = bits[8 * block : 8 * block + 6], bits[8 * block + 32 : 8 * block + 38]
        else:
            at = 8 * (block - 4)
            s, m = bits[at + 64 : at + 68] + bits[at + 6 : at + 8], bits[at + 68 : at + 72] + bits[at + 38 : at + 40]
        step, below = d * int(s[::-1], 2), dmin * int(m[::-1], 2)
        for byte in numbers[12 + block // 2 * 32 :][:32]:
            values.append(step * (byte >> 4 if block % 2 else byte % 16) - below)
    return values


def _q6(values: Tensor, weights: Tensor) -> list[bytes]:
    blocks, counts = values.view(16, 16), weights.view(16, 16)
    plain = [max(block.tolist(), key=abs) / -32 for block in blocks]
    found = []
    for scales in (plain, fit_scale(blocks, counts).flatten().tolist()):
        d = _half(max(scales, key=abs) / -128)
        s = [max(-128, min(127, round(x / d))) if d else 0 for x in scales]
        steps = torch.tensor([d * x for x in s]).view(16, 1)
        codes = (nearest_codes(blocks, steps, 0.0, -32, 31).flatten().int() + 32).tolist()
        low, high = [0] * 128, [0] * 64
        for place, code in enumerate(codes):
            half, quarter, lane = place // 128, place // 32 % 4, place % 32
            low[64 * half + 32 * (quarter % 2) + lane] |= code % 16 << 4 * (quarter // 2)
            high[32 * half + lane] |= code // 16 << 2 * quarter
        found.append(struct.pack("<192B16be", *low, *high, *s, d))
    return found


def _read_q6(packed: bytes) -> list[float]:
    *numbers, d = struct.unpack("<192B16be", packed)
    values = []
    for place in range(256):
        half, quarter, lane = place // 128, place // 32 % 4, place % 32
        low = numbers[64 * half + 32 * (quarter % 2) + lane] >> 4 * (quarter // 2) & 15
        high = numbers[128 + 32 * half + lane] >> 2 * quarter & 3
        values.append(d * numbers[192 + place // 16] * (low + 16 * high - 32))
    return values


def _half(number: float) -> float:
    return struct.unpack("<e", struct.pack("<e", number))[0]


def _decode(packed: Tensor, size: int, read) -> Tensor:  # type: ignore[no-untyped-def]
    if packed.ndim != 2 or packed.dtype != torch.uint8 or packed.shape[1] % size:
        raise ValueError(f"needs uint8 rows of a multiple of {size} bytes, got {packed.dtype}, {tuple(packed.shape)}")
    rows = [[x for at in range(0, len(row), size) for x in read(row[at : at + size])]
            for row in (bytes(line.tolist()) for line in packed)]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64).float()
