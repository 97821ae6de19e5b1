"""Task 4: 30,000 texts against the exact law of the target, and the limit that says how much chance explains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge import distributions
from grader.judge.numerics import check_equal, check_form
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(4)

TARGET = torch.tensor(
    [[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.3, 0.0, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64
)
DRAFTER = torch.tensor(
    [[0.1, 0.5, 0.2, 0.2], [0.3, 0.2, 0.3, 0.2], [0.1, 0.3, 0.3, 0.3], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64
)
VOCAB = 4


def numbers(runs: int, places: int, seed: int) -> Tensor:
    """`[runs, places, 3]` uniforms."""
    return torch.rand(runs, places, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def limit(probs: Tensor, runs: int, false_alarm: float) -> float:
    """The largest distance that chance explains; McDiarmid's inequality."""
    mean = sum(math.sqrt(p * (1 - p) / runs) for p in probs.tolist()) / 2
    return mean + math.sqrt(math.log(1 / false_alarm) / (2 * runs))


def inverse(row: Tensor, u: float) -> int:
    """The token that a uniform stands for."""
    return min(int((row.cumsum(0) <= u).sum()), int(row.nonzero().max()))


def replay(first: int, k: int, draws: Tensor) -> list[int]:
    """One text, one token after another."""
    count, text, context = len(draws), list[int](), first
    while len(text) < count:
        place, rejected = len(text), False
        for i in range(min(k, count - place - 1)):
            draft = inverse(DRAFTER[context], float(draws[place + i, 0]))
            if float(draws[place + i, 1]) < float(TARGET[context, draft] / DRAFTER[context, draft]):
                text.append(draft)
            else:
                excess = (TARGET[context] - DRAFTER[context]).clamp(min=0)
                text.append(inverse(excess / excess.sum(), float(draws[place + i, 2])))
                rejected = True
            context = text[-1]
            if rejected:
                break
        if not rejected:
            text.append(inverse(TARGET[context], float(draws[len(text), 2])))
            context = text[-1]
    return text


def test_output_distribution_is_exactly_the_target(lab: Any) -> None:
    # Right code fails with a probability of at most 1e-6 for each distance. At this size the limit is 0.02 for one
    # place; the greedy shortcut is 0.15 off, a bonus from q 0.11, resampling from p 0.05.
    runs, alarm = 30_000, 1e-6
    for k in (1, 3):
        start = k % VOCAB
        texts = lab.speculate_many(TARGET, DRAFTER, torch.full((runs,), start), 4, k, numbers(runs, 4, k))
        check_form("the texts", texts, (runs, 4), torch.int64)
        assert bool(((texts >= 0) & (texts < VOCAB)).all()), "every text has all its tokens, ids of the vocabulary"
        law = TARGET[start]
        index = texts[:, 0]
        for place in range(4):
            if place:
                law = (law.reshape(-1, VOCAB)[:, :, None] * TARGET).reshape(-1)
                index = index * VOCAB + texts[:, place]
            distance = distributions.total_variation(torch.bincount(index, minlength=len(law)) / runs, law)
            most = limit(law, runs, alarm)
            assert distance <= most, (
                f"{k} drafts a round: the first {place + 1} tokens of {runs} texts are {distance:.4f} from the "
                f"target's law; chance explains {most:.4f}, save once in a million runs"
            )


def test_each_text_goes_its_own_pace(lab: Any) -> None:
    draws = numbers(60, 9, 5)
    first = torch.arange(60) % VOCAB
    for k in (0, 1, 2, 4, 11):
        texts = lab.speculate_many(TARGET, DRAFTER, first, 9, k, draws)
        right = torch.tensor([replay(int(first[run]), k, draws[run]) for run in range(60)])
        advice = f"With {k} drafts a round each text must be what it would be alone, with its own numbers."
        check_equal("60 texts", texts, right, advice)


def test_every_place_uses_its_own_numbers(lab: Any) -> None:
    draws = numbers(1, 7, 8).expand(3, -1, -1).clone()
    draws[1, 6] = 1 - draws[1, 6]
    draws[2, 0, 1:] = 1 - draws[2, 0, 1:]
    first = torch.full((3,), 2)
    texts = lab.speculate_many(TARGET, DRAFTER, first, 7, 3, draws)
    check_form("three texts", texts, (3, 7), torch.int64)
    right = torch.tensor([replay(2, 3, draws[run]) for run in range(3)])
    check_equal("texts whose numbers differ at one place", texts, right, "Place i uses uniforms[:, i].")
    check_equal("tokens before the place that differs", texts[1, :6], texts[0, :6], "Later numbers change nothing.")


def test_the_distance_of_samples_from_a_law(lab: Any) -> None:
    probs = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    cases = [([0, 0, 1, 2], 0.0), ([0, 0, 0, 0], 0.5), ([3, 3, 3, 3], 1.0), ([1], 0.75), ([2, 2, 3, 3], 0.75)]
    for tokens, right in cases:
        got = lab.total_variation(torch.tensor(tokens), probs)
        assert isinstance(got, float) and abs(got - right) < 1e-12, (
            f"{tokens} against {probs.tolist()}: half the sum of the differences is {right}, got {got!r}"
        )


def test_the_limit_has_the_false_alarm_rate_that_it_states(lab: Any) -> None:
    even, steep = torch.full((8,), 0.125, dtype=torch.float64), torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    for probs, runs, alarm in ((even, 1000, 1e-3), (steep, 50, 0.05), (even, 30_000, 1e-6), (steep, 1, 0.5)):
        got = lab.total_variation_limit(probs, runs, alarm)
        right = limit(probs, runs, alarm)
        assert isinstance(got, float) and abs(got - right) < 1e-12, (
            f"{runs} runs, false alarm {alarm}: mean at most half the sum of standard deviations, plus "
            f"sqrt(ln(1/alarm) / (2 runs)) is {right:.6f}, got {got!r}"
        )
    # And it holds: of 400 right samplers hardly any exceeds it. More than 8 of 400 at a rate of 0.001: below 1e-8.
    generator = torch.Generator().manual_seed(2)
    draws = torch.multinomial(even, 400 * 500, replacement=True, generator=generator).reshape(400, 500)
    most = lab.total_variation_limit(even, 500, 1e-3)
    distances = [distributions.total_variation(torch.bincount(row, minlength=8) / 500, even) for row in draws]
    assert sum(distance > most for distance in distances) <= 8, "a right sampler must hardly ever exceed the limit"
    assert most < 4 * max(distances), "and the limit must not be so wide that nothing exceeds it"


def test_experiments_that_make_no_sense_are_refused(lab: Any) -> None:
    first, draws = torch.zeros(5, dtype=torch.int64), numbers(5, 3, 1)
    texts = lab.speculate_many(TARGET, DRAFTER, first, 3, 2, draws)
    check_equal("a good call", texts, torch.tensor([replay(0, 2, draws[run]) for run in range(5)]))
    call = lab.speculate_many
    check_refused("a drafter over three tokens", lambda: call(TARGET, torch.full((3, 3), 1 / 3), first, 3, 2, draws))
    check_refused("a target that isn't square", lambda: call(TARGET[:3], DRAFTER[:3], first, 3, 2, draws))
    check_refused("rows that don't add up", lambda: call(TARGET * 2, DRAFTER, first, 3, 2, draws))
    check_refused("a first token outside", lambda: call(TARGET, DRAFTER, first + 4, 3, 2, draws))
    check_refused("no tokens", lambda: call(TARGET, DRAFTER, first, 0, 2, draws[:, :0]))
    check_refused("-1 drafts", lambda: call(TARGET, DRAFTER, first, 3, -1, draws))
    check_refused("too few numbers", lambda: call(TARGET, DRAFTER, first, 4, 2, draws))
    probs = TARGET[0]
    check_refused("no samples", lambda: lab.total_variation(torch.zeros(0, dtype=torch.int64), probs))
    check_refused("an id outside", lambda: lab.total_variation(torch.tensor([4]), probs))
    check_refused("no runs", lambda: lab.total_variation_limit(probs, 0, 0.1))
    for alarm in (0.0, 1.0, -0.5):
        check_refused(f"a false-alarm rate of {alarm}", lambda rate=alarm: lab.total_variation_limit(probs, 9, rate))
