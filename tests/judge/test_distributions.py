"""The chi-square test: its false-alarm rate is what it says, and named wrong samplers fail it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grader.judge.distributions import chi_square, chi_square_tail, total_variation
from grader.judge.reference import filtered, inverse_cdf

ALPHA = 1e-6
COUNT = 8_000
RAW = [0.30, 0.22, 0.16, 0.12, 0.09, 0.06, 0.03, 0.02]
PROBS = filtered(RAW, top_p=0.9)  # six survive, with a mass of 0.95


def uniforms(seed: int, count: int = COUNT) -> Tensor:
    """Uniform numbers in float64."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn(probs: list[float], u: Tensor) -> Tensor:
    """Tokens drawn from a distribution by inversion."""
    cumulative = torch.tensor(probs, dtype=torch.float64).cumsum(0)
    return torch.searchsorted(cumulative, u, right=True).clamp(max=len(probs) - 1)


def test_tail_matches_known_quantiles() -> None:
    # 95 % and 99.9 % quantiles of printed tables.
    for statistic, degrees, tail in ((3.841, 1, 0.05), (11.070, 5, 0.05), (20.515, 5, 0.001), (18.307, 10, 0.05)):
        assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=2e-3)
    assert chi_square_tail(0.0, 4) == 1.0


def test_right_samples_give_uniform_p_values() -> None:
    # If the law holds, a share alpha of right samples falls below alpha; over 2,000 runs its standard deviation is
    # 0.0049 for alpha 0.05 and 0.0022 for 0.01.
    p_values = torch.tensor([chi_square(drawn(PROBS, uniforms(seed, 1_000)), PROBS).p_value for seed in range(2_000)])
    assert abs(float((p_values < 0.05).float().mean()) - 0.05) < 5 * 0.0049
    assert abs(float((p_values < 0.01).float().mean()) - 0.01) < 5 * 0.0022
    assert float(p_values.min()) > ALPHA


def test_right_sampler_passes() -> None:
    assert chi_square(drawn(PROBS, uniforms(1)), PROBS).p_value > ALPHA


WRONG_SAMPLERS: dict[str, Callable[[], Tensor]] = {
    "greedy": lambda: torch.zeros(COUNT, dtype=torch.int64),
    "uniform over the survivors": lambda: (uniforms(2) * 6).long(),
    "drops the token that crosses top-p": lambda: drawn(filtered(RAW, top_k=5), uniforms(3)),
    "keeps one token too many": lambda: drawn(filtered(RAW, top_k=7), uniforms(4)),
    "ignores top-p": lambda: drawn(RAW, uniforms(5)),
    "does not renormalise, remainder to the first": lambda: drawn([RAW[0] + 0.05, *RAW[1:6], 0, 0], uniforms(6)),
    "temperature of 1.2 instead of 1": lambda: drawn(
        filtered([p ** (1 / 1.2) / sum(q ** (1 / 1.2) for q in RAW) for p in RAW], top_k=6), uniforms(7)
    ),
    "one uniform for the whole batch": lambda: drawn(PROBS, uniforms(8)[:1].repeat(COUNT)),
    "product of two uniforms": lambda: drawn(PROBS, uniforms(9) * uniforms(10)),
}


@pytest.mark.parametrize("name", WRONG_SAMPLERS)
def test_wrong_samplers_fail(name: str) -> None:
    result = chi_square(WRONG_SAMPLERS[name](), PROBS)
    assert result.p_value < ALPHA, f"{name}: p = {result.p_value}"


def test_one_impossible_token_is_enough() -> None:
    tokens = drawn(PROBS, uniforms(1))
    tokens[17] = PROBS.index(0.0)
    result = chi_square(tokens, PROBS)
    assert result.p_value == 0.0 and result.impossible == PROBS.index(0.0)


def test_bad_arguments_are_refused() -> None:
    for tokens, probs in (([], PROBS), ([0, len(PROBS)], PROBS), ([-1], PROBS), ([0], [0.5, 0.4])):
        with pytest.raises(ValueError):
            chi_square(tokens, probs)


def test_total_variation_of_known_pairs() -> None:
    assert total_variation([0.5, 0.5], [0.5, 0.5]) == 0
    assert total_variation([1, 0], [0, 1]) == 1
    assert total_variation([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("probs", "settings", "survivors"),
    [
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.8}, [0, 1, 2]),
        ([0.25, 0.5, 0.125, 0.125], {"top_p": 0.75}, [0, 1]),
        ([0.1, 0.9], {"top_p": 0.0}, [1]),
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 2, "top_p": 0.5}, [3]),
        ([0.25] * 4, {"top_k": 2}, [0, 1]),
        ([0.1, 0.2, 0.3, 0.4], {"min_p": 0.51}, [2, 3]),
        ([0.2, 0.4, 0.4], {"min_p": 1.05}, [1]),
        ([0.1, 0.2, 0.3, 0.4], {}, [0, 1, 2, 3]),
    ],
)
def test_reference_filters_by_hand(probs: list[float], settings: dict[str, float], survivors: list[int]) -> None:
    got = filtered(probs, **settings)  # type: ignore[arg-type]
    assert [i for i, p in enumerate(got) if p > 0] == survivors
    assert sum(got) == pytest.approx(1.0)


def test_reference_draw_by_hand() -> None:
    assert [inverse_cdf([0, 0.25, 0, 0.75, 0], u) for u in (0.0, 0.2, 0.25, 1 - 2**-53)] == [1, 1, 3, 3]
    assert inverse_cdf([0.1] * 10 + [0.0], 1 - 2**-53) == 9
