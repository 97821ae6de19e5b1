"""Toy targets and heads for drafters that read features, and the law that a text must follow whatever they draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from grader.judge.distributions import chi_square
from grader.judge.numerics import check_close, check_form
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.decoder_layer import rms_norm
from labkit.distribution import token_distribution
from labkit.sampling_params import SamplingParams
from labkit.specs import TinyLlama

CONFIG = ModelConfig.tiny(num_layers=3, vocab_size=37)
TARGET = TinyLlama(CONFIG, 5, torch.float64)
PROMPT = [7, 0, 30, 11]
FALSE_ALARM = 1e-6
"""Probability that a right drafter fails `check_follows_target`."""


@cache
def decoder() -> Decoder:
    """The judge's own copy of the target."""
    return Decoder(CONFIG, random_weights(CONFIG, TARGET.seed, torch.float64), torch.float64)


def hidden_states(tokens: list[int], layers: Sequence[int]) -> Tensor:
    """Features of a text, `[tokens, layers * hidden]`, from one pass over all of it."""
    states = list(decoder().hidden_states(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention))
    return torch.cat([states[layer][0] for layer in layers], -1)


def last_logits(tokens: list[int]) -> Tensor:
    """The target's logits behind a text, `[1, vocab_size]`."""
    return decoder()(torch.tensor([tokens]), torch.arange(len(tokens)), full_attention)[0, -1:]


@cache
def greedy_text(length: int) -> list[int]:
    """The prompt and what the target says behind it by plain decoding."""
    text = list(PROMPT)
    while len(text) < len(PROMPT) + length:
        text.append(int(last_logits(text).argmax()))
    return text


def layer_weights(attention_width: int, seed: int) -> dict[str, Tensor]:
    """A random decoder layer of the target's shape whose attention reads `attention_width` numbers; no norm is 1."""
    hidden, heads = CONFIG.hidden_size, CONFIG.num_heads * CONFIG.head_dim
    shapes = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, attention_width),
        "self_attn.k_proj": (CONFIG.num_kv_heads * CONFIG.head_dim, attention_width),
        "self_attn.v_proj": (CONFIG.num_kv_heads * CONFIG.head_dim, attention_width),
        "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (CONFIG.intermediate_size, hidden),
        "mlp.up_proj": (CONFIG.intermediate_size, hidden), "mlp.down_proj": (hidden, CONFIG.intermediate_size),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{name}.weight": _draw(shape, generator) for name, shape in shapes.items()}


def head_weights(seed: int, draft_vocabulary: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Random embeddings, an output matrix and further weights, named with "_" for "."."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "embed_tokens.weight": _draw((CONFIG.vocab_size, CONFIG.hidden_size), generator),
        "lm_head.weight": _draw((draft_vocabulary, CONFIG.hidden_size), generator),
    }
    return weights | {name.replace("__", "."): _draw(shape, generator) for name, shape in shapes.items()}


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return 1 + 0.3 * values if len(shape) == 1 else 2 * values / shape[1] ** 0.5


def likely_tokens(settings: SamplingParams) -> list[int]:
    """Every token that the target may say at the second or third place: a draft vocabulary that often hits."""
    found: set[int] = set()
    for first in token_distribution(last_logits(PROMPT), settings)[0].nonzero().flatten().tolist():
        row = token_distribution(last_logits([*PROMPT, first]), settings)[0]
        for second in row.nonzero().flatten().tolist():
            found.add(second)
            third = token_distribution(last_logits([*PROMPT, first, second]), settings)[0]
            found |= set(third.nonzero().flatten().tolist())
    return sorted(found)


def check_follows_target(generate: Callable[[SamplingParams], Any], settings: dict[str, Any], runs: int) -> None:
    """Compare the second and third tokens of many texts with the target's law, all pairs of them at once.

    The first token comes from a pass without drafts. A right drafter fails with probability `FALSE_ALARM`.

    Args:
        generate: makes a `Speculation` of three tokens behind `PROMPT` with these settings.
        settings: of the sampling, without the seed; `top_k` small, so that there are few pairs.
        runs: texts.
    """
    plain = SamplingParams(**settings)
    law: dict[tuple[int, int], float] = {}
    for first, p in _support(PROMPT, plain):
        for second, p2 in _support([*PROMPT, first], plain):
            for third, p3 in _support([*PROMPT, first, second], plain):
                law[second, third] = law.get((second, third), 0.0) + p * p2 * p3
    numbers = {pair: index for index, pair in enumerate(law)}
    got = []
    accepted = 0
    for seed in range(runs):
        result = generate(SamplingParams(**settings, seed=seed))
        assert len(result.tokens) == 3, f"three tokens were asked for, got {result.tokens}"
        pair = tuple(result.tokens[1:])
        assert pair in numbers, f"seed {seed}: the target never says {pair} behind {result.tokens[0]} with {settings}"
        got.append(numbers[pair])
        accepted += sum(round_.accepted for round_ in result.rounds)
    assert accepted > runs // 20, f"of all drafts in {runs} texts only {accepted} came true; they should be likely"
    test = chi_square(got, [value / sum(law.values()) for value in law.values()])
    assert test.p_value > FALSE_ALARM, (
        f"second and third tokens of {runs} texts don't follow the target: p-value {test.p_value:.1e}. Drafts may "
        "cost speed, but not change the text: q must be what they were drawn from, or None if nothing was drawn."
    )


def _support(text: list[int], settings: SamplingParams) -> list[tuple[int, float]]:
    row = token_distribution(last_logits(text), settings)[0]
    return [(token, float(row[token])) for token in row.nonzero().flatten().tolist()]


def check_head_drafts(
    lab: Any,
    head: Any,
    weights: Mapping[str, Tensor],
    layers: Sequence[int],
    step: Callable[[Tensor, Tensor, Tensor], Tensor],
    read: Callable[[Tensor], Tensor] = lambda features: features,
) -> None:
    """Compare the drafts of a head at work with whole passes over all its rows.

    Args:
        lab: whose `FeatureModel` and `FeatureDrafter` the head works with.
        head: of the lab, empty.
        weights: of the head, with its norm and output matrix.
        layers: of the target that it reads.
        step: the oracle's forward function, `(hidden, tokens, positions)` with a batch axis, causal.
        read: the oracle's way from features to hidden states.
    """
    text, draws = [*PROMPT, 5, 20], [0.3, 0.8, 0.1]
    model = lab.FeatureModel(TARGET, 40, layers)
    model.append(text[:-1])
    draft = lab.FeatureDrafter(model, head, SamplingParams()).propose(text, len(draws), draws)
    rows = check_form("probs", draft.probs, (len(draws), CONFIG.vocab_size), torch.float64)
    hidden, tokens = read(hidden_states(text[:-1], layers)), text[1:]
    for place, token in enumerate(draft.tokens):
        states = step(hidden[None], torch.tensor([tokens]), torch.arange(len(tokens)))[0]
        logits = rms_norm(states[-1:], weights["norm.weight"], CONFIG.norm_eps) @ weights["lm_head.weight"].T
        check_close(
            f"q of draft {place}", rows[place], logits[0].softmax(-1), scale=100.0, dtype=torch.float64,
            advice="The first draft comes from the target's features; behind them the head's own states stand in.",
        )  # fmt: skip
        hidden, tokens = torch.cat([hidden, states[-1:]]), [*tokens, token]
