"""Stretch task 14: tokens drawn within a kernel, against exact distributions of Python floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.kernel_checks import check_accesses
from grader.judge.layouts import laid_out
from grader.judge.numerics import check_equal, check_form
from grader.judge.reference import filtered, inverse_cdf, softmax64
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(14)


@dataclass(frozen=True)
class Row:
    """A row of logits, its settings, and the number it is drawn with."""

    logits: tuple[float, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0

    def distribution(self) -> list[float]:
        """The exact probability of each token."""
        logits = torch.tensor(self.logits, dtype=torch.float32).tolist()
        return filtered(softmax64(logits, self.temperature), self.top_k, self.top_p, self.min_p)

    def settings(self) -> str:
        """For messages."""
        return f"T={self.temperature}, top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p}"


def every_token(row: Row) -> list[Row]:
    """The row once for each token that it allows, drawn just within both ends of that token's share."""
    rows, before = [], 0.0
    for p in row.distribution():
        if p > 1e-4:
            for u in (before + 1e-5, before + p / 2, before + p - 1e-5):
                rows.append(Row(row.logits, row.temperature, row.top_k, row.top_p, row.min_p, min(u, 0.999999)))
        before += p
    return rows


def arguments(rows: list[Row], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What `fused_sample` takes for these rows."""
    return [
        torch.tensor([row.logits for row in rows]).to(dtype),
        torch.tensor([row.temperature for row in rows]),
        torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        torch.tensor([row.top_p for row in rows]),
        torch.tensor([row.min_p for row in rows]),
        torch.tensor([row.uniform for row in rows]),
    ]


def check_tokens(what: str, got: object, rows: list[Row], advice: str) -> None:
    """Each row's token, by its own exact distribution."""
    tokens = check_form(what, got, (len(rows),), torch.int64)
    for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        right = inverse_cdf(row.distribution(), row.uniform)
        shown = [round(p, 4) for p in row.distribution()]
        assert token == right, (
            f"{what}, row {index} ({row.settings()}): u = {row.uniform:.6f} draws {right} from {shown}, "
            f"got {token}. {advice}"
        )


def sampled(lab: Any, rows: list[Row], **sizes: int) -> Tensor:
    """The kernel's tokens. Many rows a program: in the interpreter that takes the time of one."""
    return lab.fused_sample(*arguments(rows), **{"block_rows": 64, "block_size": 16, **sizes})


def logits_of(vocab_size: int, seed: int = 0, size: float = 2.0) -> tuple[float, ...]:
    """Logits of both signs."""
    return tuple((torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * size).tolist())


PROBS = tuple(math.log(p) for p in (0.1, 0.2, 0.3, 0.4))


def test_sampling_twin_draws_every_share(lab: Any) -> None:
    rows = []
    for seed, settings in enumerate(
        ({}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.8})
    ):
        rows += every_token(Row(logits_of(9, seed), **settings))
    advice = "Temperature, top-k, top-p, min-p; then the shares in the order of ids."
    for order in (rows, rows[::-1]):
        check_tokens("fused_sample_torch", lab.fused_sample_torch(*arguments(order)), order, advice)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 40])
def test_kernel_draws_every_share(lab: Any, vocab_size: int) -> None:
    rows = []
    for seed, temperature in enumerate((1.0, 0.5, 1.7)):
        rows += every_token(Row(logits_of(vocab_size, seed), temperature))
    advice = "The first token whose running sum exceeds u · total, over all tiles; temperature divides the logits."
    check_tokens("fused_sample", sampled(lab, rows), rows, advice)


def test_top_k_keeps_exactly_k(lab: Any) -> None:
    tied = (0.5, 1.5, 0.5, 1.5, -2.0, 1.5, 0.5, -0.0, 0.0, 3.0, -7.0, *(-9.0,) * 9)
    advice = "Exactly k survive; of equal logits (0.0 and -0.0 are equal) the lower ids."
    rows = [row for k in (1, 2, 3, 4, 6, 8, 9) for row in every_token(Row(tied, top_k=k))]
    across = tuple(1.0 if i in (3, 14, 15, 17, 19) else -2.0 for i in range(20))
    rows += [row for k in (2, 4) for row in every_token(Row(across, top_k=k))]
    check_tokens("fused_sample with top-k and ties", sampled(lab, rows), rows, advice)
    rows = [row for k in (1, 5, 13, 19, 20, 400) for row in every_token(Row(logits_of(20, k), top_k=k))]
    check_tokens("fused_sample with top-k", sampled(lab, rows), rows, advice)


def test_top_p_keeps_the_smallest_set(lab: Any) -> None:
    rows = []
    for p in (0.0, 0.15, 0.45, 0.65, 0.85, 0.95, 1.0, 1.5):
        rows += every_token(Row(PROBS, top_p=p))
    advice = "Tokens by falling probability until their mass is at least p: the one that crosses it stays."
    check_tokens("fused_sample with top-p", sampled(lab, rows), rows, advice)
    equal = [row for p in (0.1, 0.3, 0.55, 0.8) for row in every_token(Row((1.0,) * 8, top_p=p))]
    advice = "Of equal tokens at the edge the lower ids stay, as many as it takes."
    check_tokens("fused_sample with top-p of equal tokens", sampled(lab, equal), equal, advice)


def test_min_p_follows_the_likeliest(lab: Any) -> None:
    rows = []
    for m in (0.0, 0.2, 0.45, 0.6, 0.9, 1.0, 3.0):
        rows += every_token(Row(PROBS, min_p=m))
        rows += every_token(Row((1.0, 2.0, 0.5, 2.0), min_p=m))
    advice = "Keep what is at least m times as likely as the likeliest; above 1 only the first of the likeliest."
    check_tokens("fused_sample with min-p", sampled(lab, rows), rows, advice)


def test_each_filter_sees_the_survivors_of_the_last(lab: Any) -> None:
    rows = []
    for settings in (
        {"top_k": 2, "top_p": 0.5},
        {"top_k": 3, "top_p": 0.4},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.7},
        {"top_p": 0.6, "min_p": 0.9},
        {"temperature": 2.0, "top_k": 3, "top_p": 0.6},
    ):
        rows += every_token(Row(PROBS, **settings))
    # Ties that top-k has cut, in front of top-p.
    rows += every_token(Row((1.0, 1.0, 1.0, 1.0), top_k=3, top_p=0.5))
    rows += every_token(Row((1.0, 0.0, 1.0, 1.0), top_k=2, top_p=0.8))
    advice = "top-p's mass is a share of what top-k left, and ties that are out stay out."
    check_tokens("fused_sample with several filters", sampled(lab, rows), rows, advice)


def test_rows_keep_their_own_settings(lab: Any) -> None:
    settings = (
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.3},
    )
    rows = [
        Row(logits_of(21, seed), **given, uniform=u)
        for seed, given in enumerate(settings)
        for u in (0.02, 0.37, 0.71, 0.98)
    ]
    advice = "A row's token depends on nothing but that row, in any tile."
    for block_rows in (1, 4, 64):
        chosen = rows if block_rows > 1 else rows[::9]
        got = sampled(lab, chosen, block_rows=block_rows, block_size=32)
        check_tokens(f"fused_sample, {block_rows} rows in a tile", got, chosen, advice)
    logits, *others = arguments(rows)
    for layout in ("columns first", "every other"):
        got = lab.fused_sample(laid_out(logits, layout), *others, block_rows=32, block_size=32)
        check_tokens(f"fused_sample with logits {layout}", got, rows, advice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_temperature_zero_takes_the_first_of_the_largest(lab: Any, dtype: torch.dtype) -> None:
    tied = (1.0, 5.0, -3.0, 5.0, 5.0) + (0.0,) * 15
    late = (0.0,) * 18 + (2.0, 2.0)
    below = tuple(-4.0 - x for x in range(20))
    rows = [Row(x, temperature=0.0, uniform=u) for x in (tied, late, below, late[::-1]) for u in (0.0, 0.5, 0.999)]
    rows += [Row(tied, temperature=1e-5, top_k=1, uniform=0.9), Row(late, temperature=1e-5, top_p=0.3, uniform=0.4)]
    got = lab.fused_sample(*arguments(rows, dtype), block_rows=16, block_size=16)
    check_tokens("fused_sample at T = 0", got, rows, "T = 0 is the largest logit, of equal ones the lowest id.")


def test_large_logits_and_tiny_temperatures_stay_finite(lab: Any) -> None:
    far = tuple(100_000.0 + x for x in (0.0, 2.0, 1.0, 2.5))
    rows = []
    for logits in (far, tuple(-x for x in far)):
        for temperature in (1.0, 3.0, 1e-5):
            rows += every_token(Row(logits, temperature))
            rows += every_token(Row(logits, temperature, top_k=3, top_p=0.9))
    advice = "Subtract the largest logit before you divide by the temperature and exponentiate."
    check_tokens("fused_sample", sampled(lab, rows), rows, advice)


def test_impossible_tokens_are_never_drawn(lab: Any) -> None:
    hidden = -math.inf
    logits = (hidden, hidden, 0.5, hidden, 1.0, *(hidden,) * 12, 0.0, hidden, hidden, hidden)
    uniforms = (0.0, 1e-7, 0.3, 0.6, 0.9, 0.9999999, 1 - 2**-24)
    rows = [
        Row(logits, top_k=k, top_p=p, uniform=u)
        for k, p in ((0, 1.0), (2, 1.0), (5, 0.95), (21, 0.5))
        for u in uniforms
    ]
    got = sampled(lab, rows)
    inside = bool(((got >= 0) & (got < len(logits))).all())
    assert inside, f"fused_sample gave {got.tolist()} for a vocabulary of {len(logits)}"
    advice = "A weight of 0 is never drawn; if rounding leaves none above the target, take the last survivor."
    check_tokens("fused_sample", got, rows, advice)
    # A uniform next to 1 meets the total itself wherever two ways of summing round differently.
    edge = [Row(logits_of(40, seed), uniform=1 - 2**-24) for seed in range(64)]
    got = sampled(lab, edge)
    inside = bool(((got >= 0) & (got < 40)).all())
    assert inside, f"fused_sample gave {got.tolist()} for a vocabulary of 40. {advice}"


def test_rows_without_a_distribution_are_marked(lab: Any) -> None:
    good = logits_of(18, seed=5)
    bad = [(math.nan, *good[1:]), (*good[:-1], math.inf), (-math.inf,) * 18, (*good[:9], math.nan, *good[10:])]
    rows = [Row(good, top_k=4, top_p=0.9, uniform=0.6), *(Row(x, top_k=4, top_p=0.9, uniform=0.6) for x in bad)]
    rows += [Row(good, uniform=0.2), *(Row(x, temperature=0.0) for x in bad)]
    right = torch.tensor([inverse_cdf(row.distribution(), row.uniform) if row.logits == good else -1 for row in rows])
    advice = "-1 marks a row with NaN, with +inf, or with nothing but -inf; its neighbours don't notice."
    check_equal("fused_sample", sampled(lab, rows), right, advice)
    check_equal("fused_sample_torch", lab.fused_sample_torch(*arguments(rows)), right, advice)


def test_evenly_spaced_uniforms_hit_every_share(lab: Any) -> None:
    # No chance is involved: a token's count can differ from its share by one draw.
    count = 256
    row = Row(logits_of(11, seed=3), temperature=1.3, top_k=8, top_p=0.93, min_p=0.03)
    logits, *settings, _ = arguments([row] * count)
    uniforms = (torch.arange(count) + 0.5) / count
    got = lab.fused_sample(logits, *settings, uniforms, block_rows=64, block_size=16)
    check_form(f"the result of {count} draws", got, (count,), torch.int64)
    counts = [int((got == token).sum()) for token in range(11)]
    right = [p * count for p in row.distribution()]
    fits = all(abs(n - expected) <= 1.5 for n, expected in zip(counts, right, strict=True))
    assert fits, f"{row.settings()}: of {count} draws each token got {counts}, its share is {right}"


def test_sampling_runs_in_one_kernel(lab: Any) -> None:
    rows = [Row(logits_of(21, seed), top_k=6, top_p=0.9, min_p=0.02, uniform=0.1 + 0.2 * seed) for seed in range(4)]
    got, log = lab.observe("fused_sample", *arguments(rows), block_rows=2, block_size=32)
    check_tokens("fused_sample", got, rows, "")
    started = [launch.kernel for launch in log.launches]
    assert len(started) == 1, f"fused_sample must start one kernel, it started {started}"
    stored = log.bytes_stored
    assert stored == 8 * len(rows), f"only the tokens may be written, 8 bytes each: {8 * len(rows)}, not {stored} bytes"
    check_accesses("fused_sample", log)
    out = torch.full((4,), -7)
    lab.without_launches("fused_sample", *arguments(rows), out=out)
    untouched = bool((out == -7).all())
    assert untouched, "fused_sample answers although its kernel was kept from running: the kernel must do the work"


def test_sampling_refuses_what_does_not_fit(lab: Any) -> None:
    rows = [Row(logits_of(12, seed), top_k=3, uniform=0.4) for seed in range(3)]
    logits, temperatures, top_k, top_p, min_p, uniforms = given = arguments(rows)
    check_tokens("fused_sample", sampled(lab, rows), rows, "")
    check_tokens("fused_sample_torch", lab.fused_sample_torch(*given), rows, "")
    one = torch.tensor([0.5, 1.0, 0.5])
    check_refused("2 temperatures", lambda: lab.fused_sample(logits, temperatures[:2], top_k, top_p, min_p, uniforms))
    check_refused(
        "top_k in int64", lambda: lab.fused_sample(logits, temperatures, top_k.long(), top_p, min_p, uniforms)
    )
    check_refused(
        "a uniform of 1", lambda: lab.fused_sample(logits, temperatures, top_k, top_p, min_p, one), mentions="[1]"
    )
    check_refused("T below 0", lambda: lab.fused_sample(logits, -temperatures, top_k, top_p, min_p, uniforms))
    check_refused("top_k below 0", lambda: lab.fused_sample(logits, temperatures, -top_k, top_p, min_p, uniforms))
    check_refused("no tokens", lambda: lab.fused_sample(logits[:, :0], temperatures, top_k, top_p, min_p, uniforms))
    check_refused("tiles of 8", lambda: lab.fused_sample(*given, block_size=8))
