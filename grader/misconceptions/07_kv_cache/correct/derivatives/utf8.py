"""Splits ranges in the numbers, six bits at a time, instead of in the bytes."""

from __future__ import annotations

LIMITS = (0x7F, 0x7FF, 0xD7FF, 0xDFFF, 0xFFFF, 0x10FFFF)


def utf8_sequences(first: int, last: int) -> list[tuple[tuple[int, int], ...]]:
    """A stack of ranges, each split until its encodings make a box."""
    if not 0 <= first <= last <= 0x10FFFF:
        raise ValueError(f"U+{first:X} to U+{last:X} is no range of code points")
    found = []
    stack = [(first, last)]
    while stack:
        low, high = stack.pop()
        middle = next((m for m in _splits(low) if low <= m < high), None) or _uneven(low, high)
        if middle is not None:
            stack += [(low, middle), (middle + 1, high)]
        elif not 0xD800 <= low <= 0xDFFF:
            found.append(tuple(zip(chr(low).encode(), chr(high).encode(), strict=True)))
    return found


def _splits(low: int) -> list[int]:
    return [limit for limit in LIMITS if limit >= low][:1]


def _uneven(low: int, high: int) -> int | None:
    """The last number of the left half, where the lower bits of a range don't run from all 0 to all 1."""
    if high < 0x80:
        return None
    for bits in (6, 12, 18):
        mask = (1 << bits) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                return low | mask
            if high & mask != mask:
                return (high & ~mask) - 1
    return None
