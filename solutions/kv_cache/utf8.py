"""Task 13b: a range of characters becomes ranges of bytes."""

from __future__ import annotations

from labkit.regex_tree import MAX_CODE_POINT

ByteRanges = tuple[tuple[int, int], ...]
"""One range of bytes, both ends included, for each byte of a character."""

_BLOCKS = ((0x00, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, MAX_CODE_POINT))
"""Code points whose encodings have equally many bytes; between the third and the fourth lie the surrogates."""


def utf8_sequences(first: int, last: int) -> list[ByteRanges]:
    """Write a range of code points as sequences of byte ranges.

    For example U+00E0 to U+0142 is `c3 [a0-bf]` or `c4 [80-bf]` or `c5 [80-82]`.

    Args:
        first: the first code point.
        last: the last one, at least `first`.

    Returns:
        Sequences that together match exactly the UTF-8 encodings of these code points, each by one sequence only:
        no overlong forms (`c0 80`), and nothing for the surrogates U+D800 to U+DFFF, which have no encoding. Empty
        if there are only surrogates. A sequence stands for one byte out of its first range, then one out of its
        second, and so on.

    Raises:
        ValueError: the code points don't run upwards within 0 to 0x10FFFF.

    Source: RFC 3629, section 4.
    """
    if not 0 <= first <= last <= MAX_CODE_POINT:
        raise ValueError(f"first and last must run upwards within 0 to 0x10FFFF, got {first} to {last}")
    # BEGIN SOLUTION
    sequences = []
    for low, high in _BLOCKS:
        low, high = max(low, first), min(high, last)
        if low <= high:
            sequences += _between(chr(low).encode(), chr(high).encode())
    return sequences
    # END SOLUTION


# BEGIN SOLUTION
def _between(low: bytes, high: bytes) -> list[ByteRanges]:
    """Sequences for all encodings from one to another of the same length: UTF-8 keeps the order of code points."""
    if len(low) == 1:
        return [((low[0], high[0]),)]
    if low[0] == high[0]:
        return [((low[0], low[0]), *rest) for rest in _between(low[1:], high[1:])]
    # Lead bytes strictly between the two allow every continuation; so do the two if their rest is a whole range.
    least, most = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    start, end = low[0], high[0]
    sequences: list[ByteRanges] = []
    if low[1:] != least:
        sequences += [((start, start), *rest) for rest in _between(low[1:], most)]
        start += 1
    if high[1:] != most:
        sequences += [((end, end), *rest) for rest in _between(least, high[1:])]
        end -= 1
    if start <= end:
        sequences.append(((start, end), *[(0x80, 0xBF)] * len(least)))
    return sequences


# END SOLUTION
