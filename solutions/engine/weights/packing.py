"""How quantized layers run; nothing of lab 13 is needed to say it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.checks import check_count

from ..models.dense import has_units

_MEET = {torch.bfloat16: 6, torch.float32: 16}
"""Tokens from which on the dense product of a type is faster than the packed one, measured with one thread; in float32
with AVX2, while with AVX-512 they meet near 28."""
_MEET_ANEW = 64
"""The same if dense numbers are made anew in every step."""


@dataclass(frozen=True)
class Packing:
    """How quantized layers run.

    Args:
        most_tokens: up to so many tokens at once take the packed product, others a dense one; None chooses by the CPU.
            With 0 everything is computed in float32.
        dense_copies: keep the dense numbers beside the packed ones, at 16 or 32 bits a weight; else they are made anew
            in every step of many tokens.
        head_bits: 8 rounds the output projection of a quantized model too, with one scale a row; None leaves it plain.
        bfloat16: whether the dense product rounds weights and inputs to bfloat16, as the packed one does its inputs;
            None for whether the CPU has units for it. Without them it is a hundred times slower than float32.

    Raises:
        ValueError: a number out of range.
    """

    most_tokens: int | None = None
    dense_copies: bool = True
    head_bits: int | None = 8
    bfloat16: bool | None = None

    def __post_init__(self) -> None:
        if self.most_tokens is not None:
            check_count("most_tokens", self.most_tokens, 0)
        if self.head_bits not in (None, 8):
            raise ValueError(f"head_bits must be 8, or None for a plain head, got {self.head_bits!r}")
        if self.most_tokens == 0 and self.bfloat16:
            raise ValueError("most_tokens=0 computes everything in float32; leave bfloat16 out, or allow some tokens")

    @property
    def num_packed(self) -> int:
        """`most_tokens`, chosen if need be."""
        if self.most_tokens is not None:
            return self.most_tokens
        return _MEET[self.dense_dtype] if self.dense_copies else _MEET_ANEW

    @property
    def dense_dtype(self) -> torch.dtype:
        """The type of the dense product."""
        if self.most_tokens == 0:
            return torch.float32
        wanted = has_units(torch.bfloat16) if self.bfloat16 is None else self.bfloat16
        return torch.bfloat16 if wanted else torch.float32
