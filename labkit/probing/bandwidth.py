"""How fast a device reads, writes and copies its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.probing.timing import Call, Clock, Effort, Spread, time_of

KINDS = ("read", "write", "copy")


def measure_bandwidth(buffer: Tensor, clock: Clock, effort: Effort) -> dict[str, Spread]:
    """Bytes per second by kind.

    Args:
        buffer: float32, far larger than every cache and of random contents: neither caches nor compression help.
        clock: by what.
        effort: how much of it.
    """
    other = torch.empty_like(buffer)
    return {kind: time_of(call, clock, effort).rate(amount) for kind, (call, amount) in _calls(buffer, other).items()}


def _calls(buffer: Tensor, other: Tensor) -> dict[str, tuple[Call, int]]:
    """What is done, and how many bytes the program moves by it; a read and a write of one byte count as two.

    A CPU may read a line before it overwrites it, which a program doesn't see and which isn't counted, as in STREAM.
    """
    size = buffer.nbytes
    return {
        # Reads each number once and does next to no arithmetic.
        "read": (buffer.sum, size),
        "write": (lambda: other.fill_(1.5), size),
        "copy": (lambda: other.copy_(buffer), 2 * size),
    }
