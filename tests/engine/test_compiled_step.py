"""Decode steps through torch.compile: compiled as a whole, in few programs, and the same step as ever."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from grader.judge.numerics import check_close
from solutions.engine.back_end import make_runner
from solutions.engine.graphs.compiled_step import compiled
from solutions.engine.graphs.cuda_graphs import Again
from solutions.engine.graphs.padded_decoding import PaddedDecoding
from solutions.engine.memory.kv_pool import KVPool
from solutions.engine.model_runner import ModelRunner
from solutions.engine.models.blocks import Decoder
from solutions.engine.models.loading import load_decoder
from tests.engine.decode_case import BLOCK_SIZE, Memory, decode_step
from tests.engine.test_models import GetFamily, get_family  # noqa: F401

WINDOWED, LATENT = "qwen3, windows in every other layer", "deepseek v2, no experts"
LENGTHS = ([5], [9, 2], [17, 3, 3, 3], [30, 1, 1, 1, 1], [33], [2], [7] * 6)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled before, nor left behind."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def padded(model: Decoder, pool: KVPool, backend: str) -> ModelRunner:
    wrap = partial(compiled, backend=backend)
    return ModelRunner(model, pool, decoding=PaddedDecoding(model, pool, 8, 48, Again(), compile=wrap))


@pytest.mark.parametrize(("name", "backend"), [(WINDOWED, "aot_eager"), (LATENT, "eager")])
def test_steps_of_all_sizes_share_few_programs(get_family: GetFamily, name: str, backend: str) -> None:  # noqa: F811
    family = get_family(name)
    model, exact = family.model, load_decoder(family.folder, torch.float64)
    memory, true_memory = Memory(model), Memory(exact)
    runner = padded(model, memory.pool, backend)
    for seed, lengths in enumerate(LENGTHS):
        step = decode_step(lengths, model.vocab_size, seed)
        want = true_memory.logits(ModelRunner(exact, true_memory.pool), step)
        plain = memory.logits(ModelRunner(model, memory.pool), step)
        got = memory.logits(runner, step)
        check_close("logits", got, want, plain=plain, scale=float(want.abs().max()), dtype=torch.float32)
        assert memory.written() == sorted(slot for work in step.work for slot in work.slots)
    decoding = runner._decoding
    assert decoding is not None and len(decoding._recorded) == len(LENGTHS)
    # One row alone, one block alone, and all the others.
    assert 1 <= counters["stats"]["unique_graphs"] <= 4
    assert not counters["graph_break"]


def test_each_model_has_programs_of_its_own(get_family: GetFamily) -> None:  # noqa: F811
    """Nothing about a model is asked before a step, so nobody else's program may be found."""
    family, step = get_family(WINDOWED), decode_step([9, 14], get_family(WINDOWED).model.vocab_size)
    for windows in ([3, 3, 3, 3], [None, None, None, None], [2, None, 2, None]):
        model = load_decoder(family.folder, torch.float32)
        for layer, window in zip(model._layers, windows, strict=False):
            layer._attention.window = window  # type: ignore[attr-defined]
        memory = Memory(model)
        want = memory.logits(ModelRunner(model, memory.pool), step)
        got = memory.logits(padded(model, memory.pool, "eager"), step)
        check_close("logits", got, want, scale=float(want.abs().max()), dtype=torch.float32)


def test_a_step_is_compiled_whole_or_not_at_all(get_family: GetFamily) -> None:  # noqa: F811
    """Half of it would wait for the device in the middle."""
    model = get_family("mixtral").model
    memory = Memory(model)
    with pytest.raises(Exception, match="data-dependent expression"):
        memory.logits(padded(model, memory.pool, "eager"), decode_step([5, 9], model.vocab_size))


def test_what_cannot_be_compiled_is_refused(
    get_family: GetFamily, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    model = get_family(WINDOWED).model
    pool = KVPool(model.kv_shape, 4, BLOCK_SIZE, scratch=True)
    with pytest.raises(ValueError, match="torch compiles what torch computes"):
        make_runner(model, pool, 4, 16, compile=True, attention="triton")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no no-such-compiler; install one"):
        make_runner(model, pool, 4, 16, compile=True)
    assert make_runner(model, pool, 4, 16)._decoding is None
    monkeypatch.setenv("CXX", "true")
    assert make_runner(model, pool, 4, 16, compile=True)._decoding is not None


def test_little_is_read_in_vain(get_family: GetFamily, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A program is for tables of any width, so a table need not be as wide as the next power of two."""
    monkeypatch.setenv("CXX", "true")
    model = get_family(WINDOWED).model
    runner = make_runner(model, KVPool(model.kv_shape, 64, BLOCK_SIZE, scratch=True), 4, 21 * BLOCK_SIZE, compile=True)
    assert runner._decoding is not None
    widths = [runner._decoding._bucket(decode_step([blocks * BLOCK_SIZE - 1], 50)).width for blocks in (1, 8, 9, 21)]
    assert widths == [8, 8, 16, 21]
