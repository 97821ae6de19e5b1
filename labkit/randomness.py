"""Random numbers by position: the draw for (seed, step) is a pure function of both.

A generator with state ties a request's randomness to how often it was called before, and so to its batch mates,
to preemption and to speculation. A counter-based draw has no such memory: step 7 of seed 3 is the same number
wherever and whenever it is asked for.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014): a bijection on 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same seed and step.

    Args:
        seed: any integer; the request's stream.
        step: index ≥ 0 of the token within the stream.

    Raises:
        ValueError: if step is negative.
    """
    if step < 0:
        raise ValueError(f"step is {step}; give the index of the token in the stream, 0 or more")
    state = _mix((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK)
    return (_mix((state + (step + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 11) / (1 << 53)
