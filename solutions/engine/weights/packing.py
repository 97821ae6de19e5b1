"""How quantized layers run; nothing of lab 13 is needed to say it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.checks import check_count

_AVX512, _OTHERS = 64, 16
"""On a CPU with AVX2 the packed and the plain product were measured to meet near 16 tokens. On one with AVX-512 and its
bfloat16 the packed one was still twice as fast at 64, and ahead at 128; prompts are left to float32 all the same."""


@dataclass(frozen=True)
class Packing:
    """How quantized layers run.

    Args:
        most_tokens: up to so many tokens at once take the packed product; None chooses by the CPU.
        dense_copies: keep the float32 numbers beside the packed ones, at 32 bits a weight; else they are made anew in
            every step of many tokens.
        head_bits: 8 rounds the output projection of a quantized model too, with one scale a row; None leaves it plain.

    Raises:
        ValueError: a number out of range.
    """

    most_tokens: int | None = None
    dense_copies: bool = True
    head_bits: int | None = 8

    def __post_init__(self) -> None:
        if self.most_tokens is not None:
            check_count("most_tokens", self.most_tokens, 0)
        if self.head_bits not in (None, 8):
            raise ValueError(f"head_bits must be 8, or None for a plain head, got {self.head_bits!r}")

    @property
    def num_packed(self) -> int:
        """`most_tokens`, chosen if need be."""
        if self.most_tokens is not None:
            return self.most_tokens
        return _AVX512 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else _OTHERS
