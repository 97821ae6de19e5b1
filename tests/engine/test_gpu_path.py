"""Where things lie: everything that a step computes with is on the device, and one transfer brings its tokens back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.checkpoints import load_tokenizer
from labkit.config import ModelConfig
from labkit.decoder import random_weights
from labkit.drafting import Draft
from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.back_end import choose_device
from solutions.engine.beam_search import BeamSearchParams
from solutions.engine.drafting.speculation import SpeculationConfig
from solutions.engine.grammar import Constraint
from solutions.engine.graphs.cuda_graphs import Recorder
from solutions.engine.graphs.padded_decoding import PaddedDecoding
from solutions.engine.model_runner import ModelRunner
from solutions.engine.models.llama import Llama
from solutions.engine.models.loading import LoadedModel
from solutions.engine.scheduler import SchedulerConfig
from solutions.engine.weights.loading import load
from solutions.speculative.ngram import NgramDrafter
from tests.engine.pretended_gpu import DEVICE, PretendedGpu

CONFIG = ModelConfig.tiny(vocab_size=49_152, num_layers=2)
PROMPTS = [[7, 400, 31, 31, 2000, 9], [5], list(range(100, 119)), [7, 400, 31, 31, 2000, 9, 11, 12]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=3,
    logit_bias=((9, 1.0), (9, -0.5)), max_tokens=5, ignore_eos=True,
)  # fmt: skip


class ByChance:
    """A drafter that draws from a distribution."""

    def propose(self, tokens: Sequence[int], most: int, uniforms: Sequence[float]) -> Draft:
        return Draft((0,) * min(most, 2), torch.full((min(most, 2), 4), 0.25, dtype=torch.float64))


@pytest.fixture
def gpu() -> Any:
    """The pretended device, for all that a test does."""
    with PretendedGpu() as mode:
        yield mode


@pytest.fixture
def model_there(gpu: PretendedGpu) -> LoadedModel:
    """A model whose weights lie there."""
    weights = {name: one.to(DEVICE) for name, one in random_weights(CONFIG, seed=5).items()}
    return LoadedModel(Llama(CONFIG, weights, windows=[None, 7]), load_tokenizer("smollm2"))


def make_engine(model: LoadedModel, **settings: Any) -> Engine:
    limits = {key: settings.pop(key) for key in list(settings) if key in SchedulerConfig.__dataclass_fields__}
    config = EngineConfig(SchedulerConfig(**{"max_running": 4, "token_budget": 64, **limits}), **settings)
    return Engine(model, config)


TIGHT = dict(block_size=4, num_blocks=9)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(), id="plain"),
        pytest.param(TIGHT, id="preempted by recompute"),
        pytest.param(dict(**TIGHT, num_host_blocks=40, preemption="swap"), id="preempted by swap"),
        pytest.param(dict(max_chunk=3, prefix_cache="radix", block_size=4), id="pieces, and copies on write"),
        pytest.param(dict(kv_dtype="bf16"), id="bf16"),
        pytest.param(dict(kv_dtype="int8"), id="int8"),
        pytest.param(dict(kv_dtype="fp8"), id="fp8"),
        pytest.param(dict(speculation=SpeculationConfig(NgramDrafter)), id="drafts"),
        pytest.param(dict(speculation=SpeculationConfig(ByChance)), id="drafts that were drawn"),
    ],
)
def test_nothing_lies_on_the_wrong_device(
    gpu: PretendedGpu, model_there: LoadedModel, settings: dict[str, Any]
) -> None:
    engine = make_engine(model_there, **settings)
    for params in (GREEDY, DRAWN):
        answers = engine.generate(PROMPTS, params)
        assert [len(several[0].tokens) for several in answers] == [params.max_tokens] * len(PROMPTS)
    engine.add_request([1, 2], GREEDY, constraint=Constraint("regex", "[a-c]{3}"))
    engine.add_request(PROMPTS[2], DRAWN)
    engine.add_beam_search(PROMPTS[2], BeamSearchParams(2, 5))
    while engine.has_work:
        engine.step()
    if "num_blocks" in settings:
        assert engine.metrics.num_preemptions > 0


def test_the_pretended_gpu_is_strict(gpu: PretendedGpu) -> None:
    """The proof above would prove nothing if mistakes were forgiven."""
    there, here = torch.ones(2, device=DEVICE), torch.ones(2)
    assert (there + 1 + there).device == DEVICE and (here + here).sum() == 4
    for mistake in (lambda: there + here, lambda: there[torch.tensor([1])], lambda: here[there.long()]):
        with pytest.raises(AssertionError, match="tensors on"):
            mistake()
    fetched = gpu.num_fetched
    assert (there.tolist(), there.cpu().sum(), bool(there.any())) == ([0.5] * 2, 1.0, False)
    assert gpu.num_fetched == fetched + 3


def test_one_transfer_brings_a_steps_tokens_back(gpu: PretendedGpu, model_there: LoadedModel) -> None:
    def per_step(params: SamplingParams, count: int) -> float:
        engine = make_engine(model_there)
        fetched = gpu.num_fetched
        engine.generate([[3, 4, 5]] * count, params)
        return (gpu.num_fetched - fetched) / engine.metrics.num_steps

    assert per_step(GREEDY, 1) == per_step(GREEDY, 4) == 1
    assert per_step(SamplingParams(temperature=0.0, logprobs=3, max_tokens=4, ignore_eos=True), 4) == 2
    # The filters of lab 07 refuse what is no distribution, and look for it; once for the batch, not once for a row.
    assert per_step(DRAWN, 1) == per_step(DRAWN, 4)


def test_a_decode_step_asks_the_device_nothing(gpu: PretendedGpu, model_there: LoadedModel) -> None:
    """Else it could not be recorded."""

    class Watching:
        def __init__(self) -> None:
            self.runs = 0

        def record(self, compute: Any) -> Any:
            def run() -> Tensor:
                fetched = gpu.num_fetched
                result = compute()
                assert gpu.num_fetched == fetched
                self.runs += 1
                return result

            return run

    watching: Recorder = Watching()
    engine = make_engine(model_there)
    pool, limits = engine._runner._pool, engine.config.scheduler
    decoding = PaddedDecoding(model_there.model, pool, limits.max_running, limits.max_context, watching)
    engine._runner = ModelRunner(model_there.model, pool, decoding=decoding)
    engine.generate(PROMPTS, GREEDY)
    assert watching.runs >= GREEDY.max_tokens - 1


def test_a_model_stays_where_it_was_loaded(gpu: PretendedGpu, model_there: LoadedModel) -> None:
    assert make_engine(model_there)._runner.device == DEVICE
    with pytest.raises(ValueError, match="device is 'cpu', and the model was loaded to 'meta'"):
        make_engine(model_there, device="cpu")


def test_packed_products_are_a_cpus() -> None:
    with pytest.raises(ValueError, match="'int4' of this model run on device 'cpu' only, got 'cuda'"):
        load("smollm2", "int4", device="cuda")


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == choose_device("cpu") == torch.device("cpu")
    for name, message in (("cuda", "torch sees no CUDA device"), ("tpu", "one of cpu, cuda or None, got 'tpu'")):
        with pytest.raises(ValueError, match=message):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(None) == choose_device("cuda") == choose_device(None, cpu_only=False) == torch.device("cuda")
    assert choose_device(None, cpu_only=True) == torch.device("cpu")
