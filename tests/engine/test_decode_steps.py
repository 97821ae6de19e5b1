"""Pure decode steps, padded to a bucket and replayed, are what they are without; padding reads and writes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from solutions.engine import Engine
from solutions.engine.attention.decode_inputs import Bucket
from solutions.engine.back_end import make_runner
from solutions.engine.graphs.cuda_graphs import Again, CudaGraphs, Recorder
from solutions.engine.graphs.padded_decoding import PaddedDecoding
from solutions.engine.memory.features import FeaturePool
from solutions.engine.memory.kv_formats import kv_format
from solutions.engine.memory.kv_pool import KVPool
from solutions.engine.model_runner import ModelRunner
from solutions.engine.models.blocks import Decoder
from solutions.engine.models.loading import load_decoder
from solutions.engine.step import Step
from tests.engine.decode_case import BLOCK_SIZE, NUM_BLOCKS, Memory, decode_step
from tests.engine.tape import Tape
from tests.engine.test_engine import PROMPTS, SETTINGS
from tests.engine.test_models import GetFamily, get_family  # noqa: F401

PLAIN, WINDOWED = "qwen2", "qwen3, windows in every other layer"
STATIC = [PLAIN, WINDOWED, "mistral", "deepseek v2, no experts"]
LENGTHS = ([5], [1, 13], [9, 2, 30], [4, 8, 12, 16, 7])
"""The window is 7; blocks hold 4."""


def decoding(model: Decoder, pool: KVPool, recorder: Recorder, max_rows: int = 8) -> PaddedDecoding:
    return PaddedDecoding(model, pool, max_rows, model.max_context, recorder)


def padded(model: Decoder, pool: KVPool, recorder: Recorder) -> ModelRunner:
    """A runner that pads pure decodes."""
    return ModelRunner(model, pool, decoding=decoding(model, pool, recorder))


@pytest.mark.parametrize("name", STATIC)
def test_a_replayed_step_is_the_step(get_family: GetFamily, name: str) -> None:  # noqa: F811
    family = get_family(name)
    model, exact = family.model, load_decoder(family.folder, torch.float64)
    memory, true_memory, tape = Memory(model), Memory(exact), Tape()
    runner = padded(model, memory.pool, tape)
    for seed, lengths in enumerate(LENGTHS):
        step = decode_step(lengths, model.vocab_size, seed)
        want = true_memory.logits(ModelRunner(exact, true_memory.pool), step)
        plain = memory.logits(ModelRunner(model, memory.pool), step)
        for _ in range(2):  # recorded and replayed, then replayed only
            got = memory.logits(runner, step)
            check_close("logits", got, want, plain=plain, scale=float(want.abs().max()), dtype=torch.float32)
            assert memory.written() == sorted(slot for work in step.work for slot in work.slots), "and no other slot"
    assert (len(tape.recorded), tape.num_replays) == (len(LENGTHS), 2 * len(LENGTHS))


@pytest.mark.parametrize("name", STATIC)
def test_a_recorded_step_reads_nothing_but_its_inputs(get_family: GetFamily, name: str) -> None:  # noqa: F811
    """The tape runs no Python: what that decided for the first step would be wrong for the others."""
    model = get_family(name).model
    memory, tape, other = Memory(model), Tape(), Memory(model)
    replayed, computed = padded(model, memory.pool, tape), padded(model, other.pool, Again())
    for seed, lengths in enumerate(([9, 30, 2], [32, 1, 6, 17], [20, 3, 3], [31, 32, 29, 30])):
        step = decode_step(lengths, model.vocab_size, seed)
        check_equal("logits", memory.logits(replayed, step), other.logits(computed, step))
    assert len(tape.recorded) == 1


@pytest.mark.parametrize("name", STATIC)
def test_padding_reads_nothing(get_family: GetFamily, name: str) -> None:  # noqa: F811
    model, whole = get_family(name).model, list[Tensor]()

    class Keeping(Again):
        def record(self, compute: Any) -> Any:
            def run() -> Tensor:
                whole.append(compute())
                return whole[-1]

            return run

    memory = Memory(model)
    runner = padded(model, memory.pool, Keeping())
    memory.logits(runner, decode_step([7, 9, 8, 10, 11, 5, 6, 12], model.vocab_size, seed=1))
    # Fewer requests follow in the same bucket: what is left of the first in the inputs leads to blocks that are NaN.
    for seed in (2, 3):
        memory.logits(runner, decode_step([3, 12, 9, 16, 8], model.vocab_size, seed))
    assert [len(logits) for logits in whole] == [8, 8, 8]
    assert all(bool(logits.isfinite().all()) for logits in whole), "rows of nobody have read what is NaN"
    check_equal("rows of nobody", whole[1][5:], whole[2][5:])


def test_steps_are_padded_to_powers_of_two(get_family: GetFamily) -> None:  # noqa: F811
    model = get_family(PLAIN).model
    memory = Memory(model)
    for most, buckets in ((1, [1]), (2, [1, 2]), (5, [1, 2, 4, 8]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 16])):
        assert decoding(model, memory.pool, Again(), most).buckets == buckets
    steps = decoding(model, memory.pool, Again(), 8)
    runner = ModelRunner(model, memory.pool, decoding=steps)
    for lengths in ([1], [4], [5], [3, 9], [4, 1, 1], [17] * 5, [33]):
        memory.logits(runner, decode_step(lengths, model.vocab_size))
    wanted = {(1, 1), (1, 2), (2, 4), (4, 1), (8, 8), (1, 16)}
    assert {(bucket.rows, bucket.width) for bucket in steps._recorded} == wanted
    tight = PaddedDecoding(model, memory.pool, 8, 36, Again())
    assert tight._bucket(decode_step([33], model.vocab_size)) == Bucket(1, 9), "no text has more than 9 blocks"


def test_all_other_steps_are_left_alone(get_family: GetFamily) -> None:  # noqa: F811
    model = get_family(PLAIN).model
    memory = Memory(model)
    steps = decoding(model, memory.pool, Again(), 4)
    decode = decode_step([5, 9, 2], model.vocab_size)
    assert steps.takes(decode)
    first, *others = decode.work
    longer = replace(first, start=3, tokens=(1, 2), slots=(first.slots[0] - 1, first.slots[0]))
    silent = Step(tuple(replace(one, gives_token=False) for one in decode.work))
    for step in (Step(()), Step((longer, *others)), decode_step([1] * 5, model.vocab_size), silent):
        assert not steps.takes(step)


def test_only_wanted_rows_are_given(get_family: GetFamily) -> None:  # noqa: F811
    """A prompt whose last piece but one is a single token wants no logits."""
    model = get_family(PLAIN).model
    memory = Memory(model)
    runner = padded(model, memory.pool, Tape())
    step = decode_step([5, 9, 2], model.vocab_size)
    all_rows = memory.logits(runner, step)
    silent = Step((step.work[0], replace(step.work[1], gives_token=False), step.work[2]))
    check_equal("logits", memory.logits(runner, silent), all_rows[[0, 2]])


def test_the_largest_is_recorded_first_and_changes_nothing(get_family: GetFamily) -> None:  # noqa: F811
    model = get_family(PLAIN).model
    memory = Memory(model)
    steps = decoding(model, memory.pool, Again(), 6)
    for tensor in memory._tensors:
        tensor.zero_()
    steps.warm_up()
    assert [bucket.rows for bucket in steps._recorded] == [8, 4, 2, 1]
    assert not any(tensor[:NUM_BLOCKS].any() for tensor in memory._tensors)


def test_what_cannot_be_recorded_is_refused(get_family: GetFamily) -> None:  # noqa: F811
    model = get_family(PLAIN).model
    pool = KVPool(model.kv_shape, 4, BLOCK_SIZE, scratch=True)
    assert make_runner(model, pool, 4, 32).device.type == "cpu"
    with pytest.raises(ValueError, match="need device 'cuda'"):
        make_runner(model, pool, 4, 32, cuda_graphs=True)
    with pytest.raises(ValueError, match="scratch=True"):
        decoding(model, KVPool(model.kv_shape, 4, BLOCK_SIZE), Again())
    in_codes = KVPool(model.kv_shape, 4, BLOCK_SIZE, kv_format=kv_format("int8", model.dtype), scratch=True)
    mixture = get_family("mixtral").model
    pool = KVPool(mixture.kv_shape, 4, BLOCK_SIZE, scratch=True)
    assert make_runner(mixture, pool, 4, 32).device.type == "cpu"
    for wanted in (dict(cuda_graphs=True), dict(compile=True)):
        with pytest.raises(ValueError, match="leave them off with experts"):
            make_runner(mixture, pool, 4, 32, **wanted)
        with pytest.raises(ValueError, match="leave them off with keys and values in codes"):
            make_runner(model, in_codes, 4, 32, **wanted)


def test_hidden_states_are_kept_alike(get_family: GetFamily) -> None:  # noqa: F811
    """Drafters read them: of each row where its key goes, of padding where nobody looks."""
    model = get_family(PLAIN).model
    memory, step = Memory(model), decode_step([9, 2, 30], model.vocab_size)
    slots = [slot for work in step.work for slot in work.slots]

    def written(recorder: Recorder | None) -> Tensor:
        features = FeaturePool([1, 3], model, NUM_BLOCKS, BLOCK_SIZE)
        decoding = recorder and PaddedDecoding(model, memory.pool, 4, 128, recorder, features=features)
        memory.logits(ModelRunner(model, memory.pool, features, decoding=decoding), step)
        rows = torch.stack(features._pool._planes[0].tensors)[:, :NUM_BLOCKS].flatten(1, 2)[:, :, 0]
        assert sorted(slots) == rows.abs().sum(-1).sum(0).nonzero().flatten().tolist()
        return rows[:, slots]

    check_equal("hidden states", written(Tape()), written(Again()))
    plain = written(None)
    scale = 16 * float(plain.abs().max())  # roundings of three layers
    check_close("hidden states", written(Tape()), plain.double(), scale=scale, dtype=plain.dtype)


def with_recorder(engine: Engine, recorder: Recorder) -> Engine:
    """An engine whose pure decodes are kept by a recorder of the test's."""
    runner, limits = engine._runner, engine.config.scheduler
    steps = PaddedDecoding(runner._model, runner._pool, limits.max_running, limits.max_context, recorder)
    engine._runner = ModelRunner(runner._model, runner._pool, decoding=steps)
    return engine


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(dict(), id="plain"),
        pytest.param(dict(token_budget=5, max_running=4), id="prompts in pieces"),
        pytest.param(
            dict(block_size=4, num_blocks=13, num_host_blocks=40, preemption="swap", max_running=4, token_budget=64),
            id="preempted by swap",
        ),
    ],
)
def test_answers_of_replayed_steps(make_engine: Any, limits: dict[str, Any]) -> None:
    tape = Tape()
    engine = with_recorder(make_engine(**limits), tape)
    for _ in range(2):
        answers = engine.generate(PROMPTS, SETTINGS)
        want = make_engine(**limits).generate(PROMPTS, SETTINGS)
        assert [[one.tokens for one in several] for several in answers] == [
            [one.tokens for one in several] for several in want
        ]
        engine.check_idle()
    assert 0 < len(tape.recorded) < tape.num_replays


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs were not recorded: not verified on a GPU")
@pytest.mark.parametrize("name", STATIC[:3])
def test_a_cuda_graph_is_the_step(get_family: GetFamily, name: str) -> None:  # noqa: F811
    device = torch.device("cuda")
    family = get_family(name)
    exact, model = load_decoder(family.folder, torch.float64), load_decoder(
        family.folder, hold=lambda weights: {key: one.to(device) for key, one in weights.items()}
    )  # fmt: skip
    memory, true_memory = Memory(model), Memory(exact)
    runner = padded(model, memory.pool, CudaGraphs(device))
    for seed, lengths in enumerate((*LENGTHS, [9, 30, 2], [32, 1, 6, 17])):
        step = decode_step(lengths, model.vocab_size, seed)
        want = true_memory.logits(ModelRunner(exact, true_memory.pool), step)
        plain = memory.logits(ModelRunner(model, memory.pool), step).cpu()
        got = memory.logits(runner, step).cpu()
        check_close("logits", got, want, plain=plain, scale=float(want.abs().max()), dtype=torch.float32)
        assert memory.written() == sorted(slot for work in step.work for slot in work.slots)
