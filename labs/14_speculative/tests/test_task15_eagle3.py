"""Task 15: how features of several layers become one state, and what the head does with its own."""

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

pytestmark = pytest.mark.task(15)

HIDDEN = CONFIG.hidden_size
LAYERS = (1, 2, 3)
SUMS = 500.0
"""Rounding of a state: products that sum dozens of numbers each."""


def eagle3_weights(drafts: int = CONFIG.vocab_size) -> dict[str, Tensor]:
    """A random head."""
    given = head_weights(15, drafts, fc__weight=(HIDDEN, 3 * HIDDEN), norm__weight=(HIDDEN,))
    hidden_norm = 1 + 0.3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(17), dtype=torch.float64)
    return given | layer_weights(2 * HIDDEN, 16) | {"layer.hidden_norm.weight": hidden_norm}


def fused(given: dict[str, Tensor], features: Tensor) -> Tensor:
    """Layer by layer, each with its own columns."""
    return sum(
        features[..., i * HIDDEN : (i + 1) * HIDDEN] @ given["fc.weight"][:, i * HIDDEN : (i + 1) * HIDDEN].T
        for i in range(3)
    )  # type: ignore[return-value]


def normed(values: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm by its definition."""
    return values / (values.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weight


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attention of rows with those before them, wherever they stand."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def states(given: dict[str, Tensor], hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any = causal) -> Tensor:
    """The head by its definition."""
    embedded = normed(given["embed_tokens.weight"][tokens], given["layer.input_layernorm.weight"])
    joined = torch.cat([embedded, normed(hidden, given["layer.hidden_norm.weight"])], -1)
    return decoder_layer(CONFIG, given, hidden, positions, attend, joined)


def test_layers_are_fused_side_by_side(lab: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    given = eagle3_weights()
    for shape in ((3 * HIDDEN,), (4, 3 * HIDDEN), (2, 5, 3 * HIDDEN)):
        features = torch.randn(shape, generator=generator, dtype=torch.float64)
        check_close(
            f"fused features of shape {list(shape)}", lab.fused_features(given, features), fused(given, features),
            scale=100.0, dtype=torch.float64, advice="One product with fc for all layers side by side, no bias.",
        )  # fmt: skip


def test_attention_reads_embedding_and_state_each_normed(lab: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    given = eagle3_weights()
    for batch, rows, size in ((1, 1, 1.0), (2, 5, 1.0), (1, 4, 30.0)):
        hidden = size * torch.randn(batch, rows, HIDDEN, generator=generator, dtype=torch.float64)
        tokens = torch.randint(CONFIG.vocab_size, (batch, rows), generator=generator)
        positions = torch.arange(rows)
        got = lab.eagle3_features(CONFIG, given, hidden, tokens, positions, full_attention)
        check_close(
            f"states of {batch} x {rows} rows of size {size}", got, states(given, hidden, tokens, positions),
            scale=SUMS * size, dtype=torch.float64,
            advice="Attention reads [norm(embedding), norm(state)]; the stream that it adds to is the state as it is.",
        )  # fmt: skip


def test_rows_may_stand_anywhere(lab: Any) -> None:
    given = eagle3_weights()
    hidden = torch.randn(1, 2, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    tokens, positions = torch.tensor([[4, 9]]), torch.tensor([[7, 7]])
    seen: list[Any] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        seen.append((layer, positions.tolist(), list(q.shape), list(k.shape)))
        return q

    got = lab.eagle3_features(CONFIG, given, hidden, tokens, positions, attend)
    right = states(given, hidden, tokens, positions, lambda layer, q, *_: q)
    check_close("states of two siblings", got, right, scale=SUMS, dtype=torch.float64)
    heads = [1, CONFIG.num_heads, 2, CONFIG.head_dim]
    kv = [1, CONFIG.num_kv_heads, 2, CONFIG.head_dim]
    assert seen == [(0, [[7, 7]], heads, kv)], f"attention is called once, with the positions that were given: {seen}"


@pytest.mark.integration
def test_drafts_come_from_its_own_states(lab: Any) -> None:
    given = eagle3_weights()
    check_head_drafts(
        lab, lab.Eagle3Head(CONFIG, given), given, LAYERS,
        lambda hidden, tokens, positions: states(given, hidden, tokens, positions),
        lambda features: fused(given, features),
    )  # fmt: skip


@pytest.mark.integration
def test_no_eagle3_changes_the_text(lab: Any) -> None:
    for broken in (False, True):
        given = eagle3_weights()
        if broken:
            given["fc.weight"][3, 4] = torch.nan
        model = lab.FeatureModel(TARGET, 60, LAYERS)
        drafter = lab.DynamicTreeDrafter(model, lab.Eagle3Head(CONFIG, given), 3, 3, 6)
        got = lab.speculate_tree(model, drafter, PROMPT, 12)
        assert [*PROMPT, *got.tokens] == greedy_text(12), f"plain decoding: {greedy_text(12)[4:]}, got {got.tokens}"
        assert all((round_.drafted > 0) != broken for round_ in got.rounds[1:-3]), f"NaN {broken}: {got.rounds}"
    # A right drafter fails with probability 1e-6.
    settings = {"temperature": 0.8, "top_k": 2}
    ids = torch.tensor(likely_tokens(SamplingParams(**settings)))
    pruned = eagle3_weights(len(ids))

    def generate(params: SamplingParams) -> Any:
        target = lab.FeatureModel(TARGET, 8, LAYERS)
        drafter = lab.FeatureDrafter(target, lab.Eagle3Head(CONFIG, pruned, ids), SamplingParams(temperature=2.0))
        return lab.speculate(target, drafter, PROMPT, 3, params, num_drafts=2)

    check_follows_target(generate, settings, 80)
