"""Decode and prefill of two decoders, turn by turn, so that both meet the same state of the machine."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.decoder import Decoder, full_attention

ROUNDS, PROMPT, STEPS = 3, 128, 4


@dataclass(frozen=True)
class Ratio:
    """How many times as fast the second one was, over rounds.

    Args:
        values: one a round.
    """

    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{statistics.median(self.values):.2f}× ({min(self.values):.2f} – {max(self.values):.2f})"


@dataclass(frozen=True)
class Speed:
    """Ratios of speed.

    Args:
        decode: one token a step behind a prompt.
        prefill: a prompt at once.
    """

    decode: Ratio
    prefill: Ratio


def measure_speed(
    given: Decoder, packed: Decoder, rounds: int = ROUNDS, prompt: int = PROMPT, steps: int = STEPS
) -> Speed:
    """Measure both, in turn.

    Args:
        given: the peer.
        packed: the one that is measured.
        rounds: of each, after one that isn't counted.
        prompt: its tokens.
        steps: decode steps of a round.
    """
    times: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for turn in range(rounds + 1):
        first, second = _seconds(given, prompt, steps), _seconds(packed, prompt, steps)
        if turn:
            times["prefill"].append((first[0], second[0]))
            times["decode"].append((first[1], second[1]))
    prefill, decode = (Ratio(tuple(a / b for a, b in times[phase])) for phase in ("prefill", "decode"))
    return Speed(decode, prefill)


def _seconds(decoder: Decoder, prompt: int, steps: int) -> tuple[float, float]:
    """Seconds of the prefill, and of a decode step."""
    tokens = torch.arange(prompt)[None] % decoder.config.vocab_size
    cache = _Cache()
    with torch.no_grad():
        start = time.perf_counter()
        decoder.forward(tokens, torch.arange(prompt), cache.fill)
        middle = time.perf_counter()
        for step in range(steps):
            decoder.forward(tokens[:, :1], torch.tensor([prompt + step]), cache.extend)
        end = time.perf_counter()
    return middle - start, (end - middle) / steps


class _Cache:
    """Keys and values of one sequence, the simplest way: lab 07 has the real ones."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def fill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        self._kept[layer] = (k, v)
        return full_attention(layer, q, k, v, positions)

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys, values = self._kept[layer]
        self._kept[layer] = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        return F.scaled_dot_product_attention(q, *self._kept[layer], enable_gqa=True)
