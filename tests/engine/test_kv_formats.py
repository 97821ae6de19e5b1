"""Keys and values in 8 bits: what is stored of a token depends on nothing but the token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_equal
from labkit.checkpoints.loading import Model
from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.kv_manager import Move, MoveKind
from solutions.engine.memory.kv_formats import PlainKV, kv_format
from solutions.engine.memory.kv_pool import KVPool
from solutions.engine.models.kv_shape import KVShape
from solutions.engine.scheduler import SchedulerConfig

FORMATS = ("int8", "fp8")
SHAPE = KVShape(num_layers=2, num_parts=2, num_heads=3, head_dim=16)
PARAMS = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=2)
PROMPTS = [[7, 400, 31, 31, 2000, 9], [5], list(range(100, 137)), [7, 400, 31, 31, 2000, 9, 11, 12]]

Logits = Callable[[tuple[int, ...]], Tensor]


def pool_of(name: str, num_blocks: int = 4, num_host_blocks: int = 0) -> KVPool:
    return KVPool(SHAPE, num_blocks, 5, num_host_blocks, kv_format=kv_format(name, torch.float32))


def numbers(tokens: int, seed: int) -> Tensor:
    """`[tokens, heads, head_dim]` with an outlier channel, as keys have, and a token of zeros."""
    made = torch.randn(tokens, 3, 16, generator=torch.Generator().manual_seed(seed))
    made[:, :, 4] *= 30
    made[1] = 0
    return made


def rounded(name: str, part: Tensor) -> Tensor:
    """What a format stands for, by torch's own types."""
    top = 127.0 if name == "int8" else 448.0
    scale = part.abs().amax(-1, keepdim=True) / top
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (part / scale).round() if name == "int8" else (part / scale).to(torch.float8_e4m3fn).float()
    return codes * scale


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_what_the_codes_stand_for(name: str) -> None:
    pool, k, v = pool_of(name), numbers(9, 1), numbers(9, 2)
    slots = torch.tensor([3, 19, 0, 7, 8, 5, 11, 12, 4])
    pool.write(1, slots, k, v)
    keys, values = pool.read(1, torch.tensor([0, 1, 2, 3]))
    check_equal("keys", keys[slots], rounded(name, k))
    check_equal("values", values[slots], rounded(name, v))
    assert not bool(pool.read(0, torch.tensor([0, 1, 2, 3]))[0].any()), "the other layer was not written to"
    largest = k.abs().amax(-1, keepdim=True)
    relative = 0.5 / 127 if name == "int8" else 2.0**-4
    assert bool(((keys[slots] - k).abs() <= relative * largest * 1.001).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_is_stored_alike_alone_and_among_others(name: str) -> None:
    k, v = numbers(8, 3), 100 * numbers(8, 4)
    together, alone = pool_of(name), pool_of(name)
    together.write(0, torch.arange(8), k, v)
    for slot in (5, 0, 7, 2, 1, 6, 4, 3):
        alone.write(0, torch.tensor([slot]), k[slot : slot + 1], v[slot : slot + 1])
    for got, expected in zip(alone.read(0, torch.arange(4)), together.read(0, torch.arange(4)), strict=True):
        check_equal("stored alone", got, expected)


def test_a_head_too_small_for_a_scale_is_zeros() -> None:
    pool, k = pool_of("fp8"), torch.full((1, 3, 16), 448 * 1e-39)
    pool.write(0, torch.tensor([2]), k, k)
    assert not bool(pool.read(0, torch.tensor([0]))[0].any())


@pytest.mark.parametrize("name", FORMATS)
def test_moves_take_the_scales_along(name: str) -> None:
    pool = pool_of(name, num_blocks=4, num_host_blocks=2)
    for layer in range(2):
        pool.write(layer, torch.arange(5), numbers(5, layer), 7 * numbers(5, 9))
    before = [pool.read(layer, torch.tensor([0])) for layer in range(2)]
    pool.move([Move(MoveKind.COPY, 0, 2), Move(MoveKind.OUT, 2, 1)])
    pool.write(0, torch.arange(15), numbers(15, 8), numbers(15, 8))
    pool.move([Move(MoveKind.IN, 1, 3)])
    for layer in range(2):
        for got, expected in zip(pool.read(layer, torch.tensor([3])), before[layer], strict=True):
            check_equal("moved", got, expected)


def test_bytes() -> None:
    count = 2 * 2 * 4 * 5 * 3  # layers, parts, blocks, tokens, heads
    assert pool_of("fp32").num_bytes == count * 16 * 4
    assert pool_of("bf16").num_bytes == count * 16 * 2
    assert pool_of("int8").num_bytes == pool_of("fp8").num_bytes == count * (16 + 4)


def test_floats_of_another_type_are_read_in_the_type_to_compute_in() -> None:
    pool, k = pool_of("bf16"), numbers(5, 5)
    pool.write(0, torch.arange(5), k, k)
    check_equal("keys", pool.read(0, torch.tensor([0]))[0], k.bfloat16().float())
    assert kv_format(None, torch.bfloat16) == PlainKV(torch.bfloat16, torch.bfloat16)
    assert pool.parts(0) is None and pool_of("fp32").parts(0) is not None, "kernels read what is computed with"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(dict(max_running=1, token_budget=64), id="one at a time"),
        pytest.param(dict(token_budget=5, max_running=4), id="prompts in pieces"),
        pytest.param(dict(block_size=4, num_blocks=13, max_running=4, token_budget=64), id="preempted by recompute"),
        pytest.param(
            dict(block_size=4, num_blocks=13, num_host_blocks=40, preemption="swap", max_running=4, token_budget=64),
            id="preempted by swap",
        ),
        pytest.param(dict(prefix_cache="radix", block_size=4), id="radix cache"),
    ],
)
def test_how_it_is_served_changes_nothing(make_engine: Any, name: str, limits: dict[str, Any]) -> None:
    alone = [
        make_engine(prefix_cache="none", kv_dtype=name).generate([one], PARAMS)[0][0].tokens for one in PROMPTS
    ]  # fmt: skip
    engine = make_engine(kv_dtype=name, **limits)
    for _ in range(2):  # the second time with whatever the cache has kept
        assert [one[0].tokens for one in engine.generate(PROMPTS, PARAMS)] == alone
    engine.check_idle()


@pytest.mark.parametrize("name", FORMATS)
def test_samples_copy_what_they_write_to(make_engine: Any, name: str) -> None:
    params = replace(PARAMS, temperature=1.0, seed=4, n=3)
    answers = make_engine(block_size=4, kv_dtype=name).generate([PROMPTS[2]], params)[0]
    for index, answer in enumerate(answers):
        alone = replace(params, n=1, seed=4 + index)
        assert answer.tokens == make_engine(kv_dtype=name).generate([PROMPTS[2]], alone)[0][0].tokens


@pytest.mark.parametrize(("name", "within"), [("int8", 0.1), ("fp8", 0.6), ("bf16", 0.05), ("fp16", 0.01)])
def test_answers_stay_near_those_in_full_precision(
    make_engine: Any, oracle_logits: Logits, name: str, within: float
) -> None:
    prompt = PROMPTS[2]
    (answer,) = make_engine(kv_dtype=name).generate([prompt], PARAMS)[0]
    errors = []
    for step, report in enumerate(answer.logprobs):
        expected = oracle_logits((*prompt, *answer.tokens[:step])).double().log_softmax(0)
        errors += [abs(value - float(expected[token])) for token, value in report.top]
    assert 1e-6 < max(errors) < within


@pytest.mark.parametrize("name", ["int4", "float32", ""])
def test_unknown_formats_are_refused_by_name(tiny_model: Model, name: str) -> None:
    config = EngineConfig(SchedulerConfig(), num_blocks=4)
    assert not Engine(tiny_model, replace(config, kv_dtype="int8")).has_work
    with pytest.raises(ValueError, match="kv_dtype must be one of fp32, bf16, fp16, int8, fp8, kivi4, kivi2 or None"):
        Engine(tiny_model, replace(config, kv_dtype=name))
