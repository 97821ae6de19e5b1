"""Task 1: one position: what is kept, what takes the place of the rest, and that the sum of both is the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.numerics import check_close, check_equal, check_form
from grader.judge.refusal import check_refused

pytestmark = pytest.mark.task(1)

# Targets and drafters over five tokens: near, far, disjoint in part, one-hot, and equal.
TARGETS = [
    [0.40, 0.30, 0.20, 0.10, 0.00],
    [0.05, 0.15, 0.50, 0.05, 0.25],
    [0.50, 0.50, 0.00, 0.00, 0.00],
    [0.00, 0.00, 1.00, 0.00, 0.00],
    [0.25, 0.25, 0.25, 0.125, 0.125],
]
DRAFTERS = [
    [0.10, 0.20, 0.30, 0.40, 0.00],
    [0.05, 0.65, 0.10, 0.10, 0.10],
    [0.00, 0.25, 0.25, 0.25, 0.25],
    [0.20, 0.20, 0.20, 0.20, 0.20],
    [0.25, 0.25, 0.25, 0.125, 0.125],
]
P = torch.tensor(TARGETS, dtype=torch.float64)
Q = torch.tensor(DRAFTERS, dtype=torch.float64)


def exact_residual(p: list[float], q: list[float]) -> list[float]:
    """The residual of one row, number by number."""
    excess = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return [x / sum(excess) for x in excess] if sum(excess) > 1e-12 else p


def check_probs(what: str, got: object, right: Tensor, advice: str) -> None:
    """float64 numbers up to rounding."""
    check_close(what, got, right, scale=1.0, dtype=torch.float64, advice=advice)


def test_the_chance_to_be_kept_is_the_overlap(lab: Any) -> None:
    right = [sum(min(a, b) for a, b in zip(p, q, strict=True)) for p, q in zip(TARGETS, DRAFTERS, strict=True)]
    advice = "Add up, over all tokens, the smaller of p and q."
    expected = torch.tensor(right, dtype=torch.float64)
    check_probs("acceptance_probability of five rows", lab.acceptance_probability(P, Q), expected, advice)
    got = lab.acceptance_probability(P.float().reshape(5, 1, 5), Q.float().reshape(5, 1, 5))
    check_form("acceptance_probability of float32 [5, 1, 5]", got, (5, 1), torch.float64)


def test_the_residual_is_what_the_target_still_wants(lab: Any) -> None:
    right = torch.tensor([exact_residual(p, q) for p, q in zip(TARGETS, DRAFTERS, strict=True)], dtype=torch.float64)
    check_probs("residual of five rows", lab.residual(P, Q), right, "norm(max(0, p - q)); p itself where p equals q.")
    shaped = lab.residual(P.reshape(5, 1, 5), Q.reshape(5, 1, 5))
    check_probs("residual of [5, 1, 5]", shaped, right.reshape(5, 1, 5), "Each row by itself, whatever axes lead.")


def test_draws_follow_the_cumulative_distribution(lab: Any) -> None:
    row = [0.25, 0.5, 0.125, 0.125]
    for u, token in ((0.0, 0), (0.2499, 0), (0.25, 1), (0.7499, 1), (0.75, 2), (0.874, 2), (0.875, 3), (0.999, 3)):
        got = lab.draw(torch.tensor([row], dtype=torch.float64), torch.tensor([u], dtype=torch.float64))
        advice = "The first token whose cumulative probability exceeds the uniform."
        check_equal(f"draw from {row} with {u}", got, torch.tensor([token]), advice)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    got = lab.draw(P[1].expand(1000, -1), grid)
    check_form("draw of 1000 rows", got, (1000,), torch.int64)
    counts = torch.bincount(got.clamp(0, 4), minlength=5)
    check_equal("how often each token is drawn on a grid", counts, torch.tensor([50, 150, 500, 50, 250]), "As p says.")
    got = lab.draw(P[:4].reshape(2, 2, 5), torch.tensor([[0.35, 0.1], [0.6, 0.5]], dtype=torch.float64))
    check_equal("draw from [2, 2, 5]", got, torch.tensor([[0, 1], [1, 2]]), "One token a row, whatever axes lead.")


def test_a_draw_is_never_impossible(lab: Any) -> None:
    last = 1 - 2**-53
    probs = torch.tensor([[0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 1, 0, 0], [0.0, *[0.1] * 3, 0.7, 0.0]], dtype=torch.float64)
    for u, right in ((0.0, [2, 3, 1]), (last, [3, 3, 4])):
        got = lab.draw(probs, torch.full((3,), u, dtype=torch.float64))
        check_equal(f"draw with {u!r}", got, torch.tensor(right), "A token of probability 0 is never drawn.")
    tenths = torch.tensor([[0.1] * 10 + [0.0] * 3], dtype=torch.float32)
    got = lab.draw(tenths, torch.tensor([last], dtype=torch.float64))
    check_equal("draw from ten tenths", got, torch.tensor([9]), "Where rounding leaves the sum below the uniform, too.")


def test_a_draft_is_kept_below_the_ratio(lab: Any) -> None:
    p, q = P[0].expand(6, -1), Q[0].expand(6, -1)
    drafts = torch.tensor([0, 1, 2, 2, 3, 3])
    uniforms = torch.tensor([0.99, 0.99, 0.66, 0.67, 0.24, 0.26], dtype=torch.float64)
    accepted, tokens = lab.accept_or_resample(p, q, drafts, uniforms, torch.full((6,), 0.0, dtype=torch.float64))
    advice = "Draft x is kept where the uniform is below p(x) / q(x): above 1 always, at 0.2/0.3 and 0.1/0.4 sometimes."
    check_equal("which drafts are kept", accepted, torch.tensor([True, True, True, False, True, False]), advice)
    check_equal("the kept drafts", tokens[accepted], drafts[accepted], "A kept draft comes out as it is.")
    p, q, drafts = P[1].expand(3, -1), Q[1].expand(3, -1), torch.tensor([1, 1, 3])
    uniforms = torch.tensor([0.22, 0.24, 0.51], dtype=torch.float64)
    accepted, _ = lab.accept_or_resample(p, q, drafts, uniforms, uniforms)
    check_equal("which of three others are kept", accepted, torch.tensor([True, False, False]), "0.15/0.65, 0.05/0.1.")


def test_a_rejected_draft_is_replaced_from_the_residual(lab: Any) -> None:
    # The residual of row 0 is 0.75 at token 0 and 0.25 at token 1.
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    drafts = torch.full((400,), 3)
    never = torch.full((400,), 0.999, dtype=torch.float64)
    accepted, tokens = lab.accept_or_resample(P[0].expand(400, -1), Q[0].expand(400, -1), drafts, never, grid)
    assert not bool(accepted.any()), "a draft of ratio 0.25 with a uniform of 0.999 must be rejected"
    counts = torch.bincount(tokens.clamp(0, 4), minlength=5)
    advice = "A rejected draft is replaced by draw(residual(p, q), resample_uniform)."
    check_equal("what replaces 400 rejected drafts", counts, torch.tensor([300, 100, 0, 0, 0]), advice)
    accepted, tokens = lab.accept_or_resample(
        P[:3], Q[:3], torch.tensor([3, 1, 2]), torch.full((3,), 0.9, dtype=torch.float64),
        torch.full((3,), 0.5, dtype=torch.float64),
    )  # fmt: skip
    right = [exact_residual(p, q) for p, q in zip(TARGETS[:3], DRAFTERS[:3], strict=True)]
    middle = [next(i for i in range(5) if sum(row[: i + 1]) > 0.5) for row in right]
    check_equal("the replacements of three rows", tokens, torch.tensor(middle), "Each row from its own residual.")


def test_every_token_comes_out_as_often_as_the_target_wants(lab: Any) -> None:
    # Right code fails with probability alpha a row. Greedy matching, keeping everything, or resampling from p fail
    # with p-values below 1e-100 at this size.
    alpha, count = 1e-6, 20_000
    generator = torch.Generator().manual_seed(14)
    for row in range(4):
        drafts = torch.multinomial(Q[row], count, replacement=True, generator=generator)
        uniforms = torch.rand(2, count, generator=generator, dtype=torch.float64)
        p, q = P[row].expand(count, -1), Q[row].expand(count, -1)
        accepted, tokens = lab.accept_or_resample(p, q, drafts, uniforms[0], uniforms[1])
        check_form("the tokens", tokens, (count,), torch.int64)
        check_form("which were kept", accepted, (count,), torch.bool)
        result = chi_square(tokens, P[row])
        shares = [round(float((tokens == token).double().mean()), 3) for token in range(5)]
        assert result.p_value > alpha, (
            f"drafts from {DRAFTERS[row]} judged for the target {TARGETS[row]} come out with the shares {shares}; "
            f"p-value {result.p_value:.1e}"
        )
        overlap = float(torch.minimum(P[row], Q[row]).sum())
        assert chi_square(accepted.long(), [1 - overlap, overlap]).p_value > alpha, (
            f"{float(accepted.double().mean()):.3f} of the drafts were kept, expected {overlap:.3f}"
        )


def test_what_is_no_distribution_is_refused(lab: Any) -> None:
    half = torch.tensor([0.5], dtype=torch.float64)
    p, q, draft = P[:1], Q[:1], torch.tensor([1])
    _, tokens = lab.accept_or_resample(p, q, draft, half, half)
    check_equal("a good call", tokens, draft, "Its ratio is 1.5.")
    for what, bad in (
        ("a sum of 1.1", torch.tensor([[0.5, 0.3, 0.2, 0.1, 0.0]])),
        ("a negative number", torch.tensor([[0.7, 0.5, -0.2, 0.0, 0.0]])),
        ("NaN", torch.tensor([[0.5, 0.5, torch.nan, 0.0, 0.0]])),
        ("four tokens", torch.tensor([[0.25] * 4])),
    ):
        check_refused(f"p with {what}", lambda bad=bad: lab.residual(bad, q))
        check_refused(f"q with {what}", lambda bad=bad: lab.acceptance_probability(p, bad))
        check_refused(f"p with {what}", lambda bad=bad: lab.accept_or_resample(bad, q, draft, half, half))
    check_refused("a draft that q can't draw", lambda: lab.accept_or_resample(p, q, torch.tensor([4]), half, half))
    check_refused("a draft outside", lambda: lab.accept_or_resample(p, q, torch.tensor([5]), half, half))
    check_refused("a uniform of 1", lambda: lab.accept_or_resample(p, q, draft, half * 2, half))
    check_refused("a uniform below 0", lambda: lab.draw(p, half - 0.6))
    check_refused("two uniforms for a row", lambda: lab.draw(p, torch.tensor([0.5, 0.5])))
