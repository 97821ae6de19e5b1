"""Quantized weights in the engine: what a checkpoint stands for is what answers, packed or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from labkit.checkpoints import CheckpointError, load_tokenizer
from labkit.checkpoints.bundled import bundled_folder
from labkit.checkpoints.loading import Model
from labkit.config import ModelConfig
from labkit.decoder import Decoder, full_attention, random_weights
from labkit.tokenizer import Tokenizer
from labkit.transformers_model import build_transformers_model
from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.models import loading as families
from solutions.engine.scheduler import SchedulerConfig
from solutions.engine.weights import packed_files
from solutions.engine.weights.formats import ROUNDINGS
from solutions.engine.weights.loading import load
from solutions.engine.weights.packing import Packing
from solutions.engine.weights.projection import projection
from solutions.engine.weights.q4_k import split_q4_k
from solutions.engine.weights.store import QuantizedWeights
from solutions.engine.weights.stored import stored_file
from solutions.quantization.exporting import Origin, export
from solutions.quantization.methods import Settings
from solutions.quantization.pipeline import quantize_model
from solutions.quantization.quantized_model import GgufTensor, QuantizedLinear
from tests.engine.families import oracle_of
from tests.labkit.gguf_files import write_gguf
from tests.quantization.small_models import calibration

CONFIG = ModelConfig.tiny(
    architecture="qwen2", vocab_size=300, hidden_size=96, intermediate_size=160, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=16,
)  # fmt: skip
PROMPTS = [(3, 14, 15, 92, 65, 35), (7,), tuple(range(60, 97))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
EXACT = Packing(most_tokens=0)
BFLOAT16_SCALES = {"int4", "q4_0", "q4_1", "q4_k", "int8"}
"""Formats that torch has a packed product for; its scales are bfloat16."""


def weight(rows: int, seed: int, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 16


@cache
def tokenizer() -> Tokenizer:
    """Of the bundled model; nobody reads what these models write."""
    return load_tokenizer("smollm2")


def model(config: ModelConfig = CONFIG) -> Model:
    return Model(Decoder(config, random_weights(config, seed=5)), tokenizer())


def engine(source: Any, **settings: Any) -> Engine:
    limits = {key: settings.pop(key) for key in list(settings) if key in SchedulerConfig.__dataclass_fields__}
    return Engine(source, EngineConfig(scheduler=SchedulerConfig(**limits), num_blocks=64, **settings))


def rounded(weights: dict[str, Tensor], format: str) -> dict[str, Tensor]:
    """The weights that a format stands for, those of projections only."""
    return {
        name: ROUNDINGS[format](tensor).weight() if name.endswith("proj.weight") else tensor
        for name, tensor in weights.items()
    }


def check_answers(source: Any, exact: dict[str, Tensor], within: float, **settings: Any) -> None:
    """Each reported log-probability against transformers in float64 with the weights `exact`."""
    oracle = build_transformers_model(CONFIG, exact, torch.float64)
    check_against(lambda ids: oracle(ids).logits[0], source, within, **settings)


def check_against(logits: Callable[[Tensor], Tensor], source: Any, within: float, **settings: Any) -> None:
    """Each reported log-probability against those of `logits`, from ids `[1, tokens]` to `[tokens, vocab_size]`."""
    answers = engine(source, **settings).generate(PROMPTS, PARAMS)
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        assert answer.logprobs is not None and len(answer.tokens) == PARAMS.max_tokens
        with torch.no_grad():
            rows = logits(torch.tensor([[*prompt, *answer.tokens]]))[len(prompt) - 1 : -1]
        expected = rows.log_softmax(-1)
        for row, report in zip(expected, answer.logprobs, strict=True):
            got = torch.tensor([value for _, value in report.top])
            wanted = row[[token for token, _ in report.top]]
            assert float((got - wanted).abs().max()) < within
            # The likeliest in the engine's eyes is it for the oracle, too, or nearly.
            assert float(row.max() - wanted[0]) < 2 * within


@pytest.mark.parametrize("format", ROUNDINGS)
def test_few_tokens_and_many_meet_the_same_numbers(format: str) -> None:
    layers = [ROUNDINGS[format](weight(rows, rows)) for rows in (48, 16, 32)]
    stored = torch.cat([layer.weight() for layer in layers])
    run = projection(layers, Packing(most_tokens=16, bfloat16=False))
    many = run(torch.eye(256)).T.contiguous()
    few = torch.cat([run(part) for part in torch.eye(256).split(16)]).T
    if format in BFLOAT16_SCALES:
        # The packed product rounds its outputs to bfloat16, and a value is one of them here.
        check_close("few tokens", few.bfloat16(), many.double(), scale=float(stored.abs().max()) / 8,
                    dtype=torch.bfloat16)  # fmt: skip
        assert float((few - many.bfloat16()).abs().max()) <= 2.0**-8 * float(many.abs().max())
        # Scale and middle are each off by half a unit in the last of 8 bits, codes minus 8 reach 8.
        assert float((many - stored).abs().max()) <= 2.0**-8 * float(stored.abs().max()) * 1.5
    elif format == "w8a8":
        assert float((many - stored).abs().max()) <= 1e-6
    else:
        check_equal("few tokens", few.contiguous(), many)
        check_equal("many tokens", many, stored)


@pytest.mark.parametrize("most_tokens", [0, 4, 5])
@pytest.mark.parametrize("dense_copies", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_the_number_of_tokens_decides_which_way(most_tokens: int, dense_copies: bool, bfloat16: bool) -> None:
    packing = Packing(most_tokens, dense_copies, bfloat16=bfloat16 and most_tokens > 0)
    run = projection([ROUNDINGS["int4"](weight(32, 1))], packing)
    exact = projection([ROUNDINGS["int4"](weight(32, 1))], EXACT)
    tokens = torch.randn(6, 256, generator=torch.Generator().manual_seed(3))
    numbers = exact(torch.eye(256)).T.double()
    for count in range(7):
        packed = 0 < count <= most_tokens
        half = packed or packing.dense_dtype == torch.bfloat16
        outputs = run(tokens[:count])
        assert outputs.shape == (count, 32) and outputs.dtype == torch.float32
        assert torch.equal(outputs, outputs.bfloat16().float()) == (half or count == 0)
        dtype = torch.bfloat16 if half else torch.float32
        # The packed product rounds its inputs only, the dense one of bfloat16 the weights as well.
        used = numbers if packed else numbers.to(dtype).double()
        reference = tokens[:count].to(dtype).double() @ used.T
        check_close("outputs", outputs.to(dtype), reference, scale=float(exact(tokens).abs().max()), dtype=dtype)


@pytest.mark.parametrize(
    ("units", "most", "dense"),
    [((), 16, torch.float32), (("avx512_bf16",), 6, torch.bfloat16), (("amx_bf16",), 6, torch.bfloat16)],
)
def test_the_cpu_decides_where_nobody_does(
    monkeypatch: pytest.MonkeyPatch, units: tuple[str, ...], most: int, dense: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(units, True))
    assert (Packing().num_packed, Packing(most_tokens=3).num_packed, EXACT.num_packed) == (most, 3, 0)
    assert (Packing().dense_dtype, EXACT.dense_dtype) == (dense, torch.float32)
    assert (Packing(bfloat16=False).num_packed, Packing(bfloat16=True).num_packed) == (16, 6)
    assert Packing(dense_copies=False).num_packed == 64, "many tokens pay for making dense numbers anew"


def test_codes_of_q4_k_stand_for_the_same_numbers() -> None:
    matrix = weight(16, 6, columns=512)
    matrix[3] = 0
    matrix[4, :256] = 0.25
    stored = ROUNDINGS["q4_k"](matrix).stored
    assert isinstance(stored, GgufTensor) and stored.kind == "Q4_K"
    codes, scale, minimum = split_q4_k(stored.data)
    assert (int(codes.min()), int(codes.max())) == (0, 15)
    values = scale[..., None] * codes.unflatten(-1, (-1, 32)) - minimum[..., None]
    check_equal("values", values.flatten(1), QuantizedLinear(stored).weight())


@pytest.mark.parametrize("formats", [("q4_1", "q6_k", "int4"), ("int8", "w8a8", "int8")])
def test_layers_stored_in_different_ways_stand_side_by_side(formats: tuple[str, ...]) -> None:
    layers = [ROUNDINGS[name](weight(32, seed)) for seed, name in enumerate(formats)]
    run = projection(layers, EXACT)
    tokens = torch.randn(3, 256, generator=torch.Generator().manual_seed(4))
    apart = torch.cat([projection([layer], EXACT)(tokens) for layer in layers], -1)
    check_equal("side by side", run(tokens), apart)


@pytest.mark.parametrize("format", ["nf4", "fp8", "mxfp4", "nvfp4", "q5_1", "q8_0"])
def test_formats_without_a_packed_product_answer_in_float32(format: str) -> None:
    given = model()
    check_answers(given, rounded(given.decoder.weights, format), 1e-4, weights=format, packing=Packing(head_bits=None))


@pytest.mark.parametrize(("format", "within"), [("int4", 0.15), ("q4_1", 0.15), ("int8", 0.15), ("w8a8", 0.3)])
def test_packed_formats_answer_as_their_numbers_do(format: str, within: float) -> None:
    """bfloat16 activations, or 8-bit ones, and a head in 8 bits move log-probabilities a little."""
    given = model()
    check_answers(given, rounded(given.decoder.weights, format), within, weights=format)


def test_how_it_is_served_changes_nothing() -> None:
    given = model()
    alone = [engine(given, weights="int4", packing=EXACT).generate([one], PARAMS)[0][0].tokens for one in PROMPTS]
    for limits in (dict(), dict(token_budget=5, max_running=3), dict(prefix_cache="radix", block_size=4)):
        served = engine(given, weights="int4", packing=EXACT, **limits)
        for _ in range(2):
            assert [one[0].tokens for one in served.generate(PROMPTS, PARAMS)] == alone
        served.check_idle()


def test_the_head_is_rounded_and_the_embedding_is_not() -> None:
    weights = QuantizedWeights(model().decoder.weights, rounding=ROUNDINGS["int4"], packing=EXACT)
    embedding = weights["model.embed_tokens.weight"]
    rows = weights.joined(["model.embed_tokens"])(torch.eye(96)).T
    error = (rows - embedding).abs().amax(-1) / embedding.abs().amax(-1)
    assert 0 < float(error.max()) <= 0.5 / 127 + 2.0**-8
    assert weights["model.embed_tokens.weight"] is embedding
    assert not QuantizedWeights({}, packing=Packing(head_bits=None)).joins("lm_head")


@pytest.mark.parametrize(
    ("method", "format", "within"),
    [
        ("gptq", "gptq", 0.15), ("awq", "awq", 0.15), ("rtn", "compressed-tensors", 0.15),
        ("smoothquant", "compressed-tensors", 0.15), ("fp8", "compressed-tensors", 0.15), ("q4_0", "gguf", 0.15),
    ],
)  # fmt: skip
def test_checkpoints_run_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, format: str, within: float
) -> None:
    monkeypatch.setattr(packed_files, "cache_dir", lambda: tmp_path / "cache")
    decoder = model().decoder
    settings = Settings(group_size=32, symmetric=False)
    quantized = quantize_model(decoder, method, settings, calibration())
    write_gguf(tmp_path / "plain.gguf", CONFIG, decoder.weights)
    made = tmp_path / "made"
    export(quantized, format, made, Origin(bundled_folder(), tmp_path / "plain.gguf", method, settings, "random"))
    if method in ("smoothquant", "fp8"):  # the activations are quantized, too
        same = quantized.decoder()
        check_against(lambda ids: same(ids, torch.arange(ids.shape[1]), full_attention)[0], str(made), within,
                      weights="stored")  # fmt: skip
    else:
        check_answers(str(made), quantized.weights(), within, weights="stored")
        # Dequantized, it is an ordinary model.
        check_answers(str(made), quantized.weights(), 0.01, weights="fp32")


@pytest.mark.parametrize("family", ["mixtral", "deepseek v2", "deepseek v3", "qwen3"])
def test_other_families_are_rounded_too(tmp_path: Path, family: str) -> None:
    oracle = oracle_of(family)
    oracle.save_pretrained(tmp_path)
    made: list[str] = []

    def hold(plain: families.Weights) -> families.Weights:
        def rounding(matrix: Tensor) -> QuantizedLinear:
            made.append(str(tuple(matrix.shape)))
            return ROUNDINGS["int8"](matrix)

        return QuantizedWeights(plain, rounding=rounding, packing=EXACT)

    tokens = torch.tensor([list(PROMPTS[2])])
    run = families.load_decoder(tmp_path, hold=hold)
    assert len(made) > 10, "projections were to be rounded"
    answer = engine(families.LoadedModel(run, tokenizer())).generate([PROMPTS[2]], PARAMS)[0][0]
    with torch.no_grad():
        wanted = oracle(tokens).logits[0, -1].log_softmax(-1)
    assert answer.logprobs is not None
    got = answer.logprobs[0]
    assert 0 < max(abs(value - float(wanted[token])) for token, value in got.top) < 0.2


def test_a_folder_that_says_that_nothing_is_quantized_is_plain(tmp_path: Path) -> None:
    for said, found in (({"bits": 4}, tmp_path), ({}, None), (None, None)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}), encoding="utf-8")
        assert stored_file(str(tmp_path)) == found


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_holds_everything_in_it(name: str) -> None:
    given = model()
    loaded = load(given, name)
    assert loaded.model.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    check_answers(given, given.decoder.weights, 0.5, weights=name)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: engine(model(), weights="int3"), "weights must be one of fp32, bf16"),
        (lambda: engine(model(), weights="stored"), "no codes"),
        (lambda: engine(model(), weights="q4_2"), "q4_1"),
        (lambda: Packing(most_tokens=-1), "most_tokens"),
        (lambda: Packing(head_bits=4), "head_bits must be 8"),
        (lambda: Packing(most_tokens=0, bfloat16=True), "everything in float32"),
        (lambda: projection([QuantizedLinear(ROUNDINGS["int4"](weight(16, 0)).stored, "int4")], EXACT), "simulated"),
    ],
)
def test_what_can_not_be_held_so_is_refused(attempt: Any, message: str) -> None:
    assert load(model(), "int4").model.vocab_size == CONFIG.vocab_size
    with pytest.raises(ValueError, match=message):
        attempt()


def test_matrices_that_a_format_does_not_fit_are_named() -> None:
    small = model(ModelConfig.tiny())
    with pytest.raises(CheckpointError, match=r"q4_1: .*layers\.0\.self_attn\.q_proj.*32 columns"):
        load(small, "q4_1")
