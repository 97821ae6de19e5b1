"""How quantized layers run; nothing of lab 13 is needed to say it."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.checks import check_count


@dataclass(frozen=True)
class Packing:
    """How quantized layers run.

    Args:
        most_tokens: up to so many tokens at once take the packed product; on a CPU with AVX2 the two meet near 16.
        dense_copies: keep the float32 numbers beside the packed ones, at 32 bits a weight; else they are made anew in
            every step of many tokens.
        head_bits: 8 rounds the output projection of a quantized model too, with one scale a row; None leaves it plain.

    Raises:
        ValueError: a number out of range.
    """

    most_tokens: int = 16
    dense_copies: bool = True
    head_bits: int | None = 8

    def __post_init__(self) -> None:
        check_count("most_tokens", self.most_tokens, 0)
        if self.head_bits not in (None, 8):
            raise ValueError(f"head_bits must be 8, or None for a plain head, got {self.head_bits!r}")
