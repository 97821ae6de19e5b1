"""Task 16: how a module for multi-token prediction joins state and token, and drafts with the model's own head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.feature_heads import (
    CONFIG,
    PROMPT,
    TARGET,
    check_follows_target,
    check_head_drafts,
    greedy_text,
    head_weights,
    layer_weights,
    likely_tokens,
)
from grader.judge.numerics import check_close
from labkit.decoder import full_attention
from labkit.decoder_layer import decoder_layer
from labkit.sampling_params import SamplingParams

pytestmark = pytest.mark.task(16)

HIDDEN = CONFIG.hidden_size
LAYERS = (CONFIG.num_layers,)
SUMS = 500.0
"""Rounding of a state: products that sum dozens of numbers each."""


def mtp_weights(drafts: int = CONFIG.vocab_size) -> dict[str, Tensor]:
    """A random module."""
    norms = {"norm__weight": (HIDDEN,), "hnorm__weight": (HIDDEN,), "enorm__weight": (HIDDEN,)}
    return head_weights(16, drafts, eh_proj__weight=(HIDDEN, 2 * HIDDEN), **norms) | layer_weights(HIDDEN, 17)


def normed(values: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm by its definition."""
    return values / (values.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weight


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attention of rows with those before them, wherever they stand."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def states(given: dict[str, Tensor], hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any = causal) -> Tensor:
    """The module by its definition."""
    of_state, of_token = given["eh_proj.weight"].split(HIDDEN, 1)
    joined = normed(hidden, given["hnorm.weight"]) @ of_state.T
    joined = joined + normed(given["embed_tokens.weight"][tokens], given["enorm.weight"]) @ of_token.T
    return decoder_layer(CONFIG, given, joined, positions, attend)


def test_state_and_embedding_are_normed_and_joined(lab: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    given = mtp_weights()
    for batch, rows, size in ((1, 1, 1.0), (2, 5, 1.0), (1, 4, 30.0), (1, 3, 0.01)):
        hidden = size * torch.randn(batch, rows, HIDDEN, generator=generator, dtype=torch.float64)
        tokens = torch.randint(CONFIG.vocab_size, (batch, rows), generator=generator)
        positions = torch.arange(rows)
        got = lab.mtp_features(CONFIG, given, hidden, tokens, positions, full_attention)
        check_close(
            f"states of {batch} x {rows} rows of size {size}", got, states(given, hidden, tokens, positions),
            scale=SUMS, dtype=torch.float64,
            advice="eh_proj reads [hnorm(state), enorm(embedding)], in this order; then comes the layer.",
        )  # fmt: skip


def test_the_module_s_rows_may_stand_anywhere(lab: Any) -> None:
    given = mtp_weights()
    hidden = torch.randn(1, 2, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    tokens, positions = torch.tensor([[4, 9]]), torch.tensor([[7, 7]])
    seen: list[Any] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        seen.append((layer, positions.tolist(), list(q.shape)))
        return q

    got = lab.mtp_features(CONFIG, given, hidden, tokens, positions, attend)
    right = states(given, hidden, tokens, positions, lambda layer, q, *_: q)
    check_close("states of two siblings", got, right, scale=SUMS, dtype=torch.float64)
    calls = [(0, [[7, 7]], [1, CONFIG.num_heads, 2, CONFIG.head_dim])]
    assert seen == calls, f"attention is called once, with the positions that were given: {seen}"


@pytest.mark.integration
def test_one_module_drafts_many_tokens(lab: Any) -> None:
    given = mtp_weights()
    check_head_drafts(
        lab, lab.MtpHead(CONFIG, given), given, LAYERS,
        lambda hidden, tokens, positions: states(given, hidden, tokens, positions),
    )  # fmt: skip


@pytest.mark.integration
def test_no_module_changes_the_text(lab: Any) -> None:
    for broken in (False, True):
        given = mtp_weights()
        if broken:
            given["eh_proj.weight"][3, 4] = torch.nan
        model = lab.FeatureModel(TARGET, 60, LAYERS)
        drafter = lab.FeatureDrafter(model, lab.MtpHead(CONFIG, given), SamplingParams(temperature=0))
        got = lab.speculate(model, drafter, PROMPT, 12, num_drafts=2)
        assert [*PROMPT, *got.tokens] == greedy_text(12), f"plain decoding: {greedy_text(12)[4:]}, got {got.tokens}"
        assert all((round_.drafted > 0) != broken for round_ in got.rounds[1:-2]), f"NaN {broken}: {got.rounds}"
    # A right drafter fails with probability 1e-6.
    settings = {"temperature": 0.8, "top_k": 2}
    ids = torch.tensor(likely_tokens(SamplingParams(**settings)))
    pruned = mtp_weights(len(ids))

    def generate(params: SamplingParams) -> Any:
        target = lab.FeatureModel(TARGET, 8, LAYERS)
        drafter = lab.FeatureDrafter(target, lab.MtpHead(CONFIG, pruned, ids), SamplingParams(temperature=2.0))
        return lab.speculate(target, drafter, PROMPT, 3, params, num_drafts=2)

    check_follows_target(generate, settings, 80)
