"""Adapters: a request's answer is that of a model into which its adapter was merged, whoever is served beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from labkit.checkpoints.errors import CheckpointError
from labkit.checkpoints.loading import Model
from labkit.decoder import Decoder
from labkit.transformers_model import build_transformers_model
from solutions.engine import Completion, Engine, EngineConfig, SamplingParams
from solutions.engine.__main__ import app
from solutions.engine.beam_search import BeamSearchParams
from solutions.engine.drafting.speculation import SpeculationConfig
from solutions.engine.models.adapters import AdaptedWeights, Adapters, read_adapter
from solutions.engine.models.llama import Llama
from solutions.engine.models.loading import LoadedModel
from solutions.engine.scheduler import SchedulerConfig
from solutions.engine.server.server_config import ServerConfig
from solutions.engine.weights.loading import load
from tests.engine.test_server import start
from tests.engine.test_speculation import Bushy, Oracle

ALL = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
SOME = ("self_attn.v", "mlp.up")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[7, 400, 31, 31, 2000, 9], [5], list(range(100, 137)), [7, 400, 31, 31, 2000, 9, 11, 12]]


def write_adapter(folder: Path, model: Model, parts: tuple[str, ...], rank: int, seed: int, **entries: Any) -> Path:
    """An adapter in peft's layout, large enough to change what is written."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for layer in range(model.config.num_layers):
        for part in parts:
            name = f"model.layers.{layer}.{part}_proj"
            rows, columns = model.decoder.weights[f"{name}.weight"].shape
            for letter, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                made = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = made
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none", **entries}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folders(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of different ranks, for different layers, scaled by different rules."""
    path = tmp_path_factory.mktemp("adapters")
    large = write_adapter(path / "large", tiny_model, ALL, 4, 1)
    small = write_adapter(path / "small", tiny_model, SOME, 2, 2, use_rslora=True)
    return {"large": str(large), "small": str(small)}


def merged(model: Model, folder: str) -> Model:
    """The base with an adapter's products in its weights: W + s · B A."""
    config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    parts, weights = load_file(Path(folder) / "adapter_model.safetensors"), dict(model.decoder.weights)
    for key, down in parts.items():
        if ".lora_A." in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            weights[name] = weights[name] + scale * parts[key.replace("lora_A", "lora_B")] @ down
    return Model(Decoder(model.config, weights), model.tokenizer)


def engine_of(model: Model, folders: Mapping[str, str], **limits: Any) -> Engine:
    return Engine(model, EngineConfig(SchedulerConfig(**limits), num_blocks=100, block_size=4, adapters=folders))


def finish(engine: Engine) -> dict[str, Completion]:
    done = {}
    while engine.has_work:
        done |= {one.request_id: one.completion for one in engine.step() if one.completion is not None}
    engine.check_idle()
    return done


def test_answers_are_those_of_transformers_with_the_adapter_merged(tiny_model: Model, folders: dict[str, str]) -> None:
    engine = engine_of(tiny_model, folders, token_budget=11, max_running=9)  # chunks of all beside each other
    models = {None: tiny_model, **{name: merged(tiny_model, folder) for name, folder in folders.items()}}
    wanted = {
        engine.add_request(prompt, PARAMS, adapter=name): (prompt, name) for prompt in PROMPTS[:3] for name in models
    }
    done = finish(engine)
    assert len({done[name].tokens for name in wanted}) > 2, "the adapters were to change what is written"
    oracles = {
        name: build_transformers_model(model.config, model.decoder.weights, torch.float32)
        for name, model in models.items()
    }
    for request, (prompt, name) in wanted.items():
        text = list(prompt)
        for token in done[request].tokens:
            with torch.no_grad():
                assert token == int(oracles[name](torch.tensor([text])).logits[0, -1].argmax()), f"adapter {name}"
            text.append(token)


def test_what_is_cached_for_one_is_nothing_to_another(tiny_model: Model, folders: dict[str, str]) -> None:
    engine = engine_of(tiny_model, folders)

    def cached(adapter: str | None, salt: str | None = None) -> int:
        name = engine.add_request(PROMPTS[2], PARAMS, adapter=adapter, salt=salt)
        return finish(engine)[name].num_cached_tokens

    assert [cached("large"), cached("small"), cached(None), cached(None, "large")] == [0, 0, 0, 0]
    assert [cached("large"), cached("small"), cached(None), cached(None, "large")] == [36, 36, 36, 36]


def test_samples_and_beams_keep_their_adapter(tiny_model: Model, folders: dict[str, str]) -> None:
    engine, alone = engine_of(tiny_model, folders), engine_of(merged(tiny_model, folders["large"]), {})
    params = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=6, ignore_eos=True)
    name = engine.add_request(PROMPTS[0], params, adapter="large")
    found = []
    while engine.has_work:
        found += [one.completion for one in engine.step() if one.completion is not None]
    assert {one.request_id.partition(".")[0] for one in found} == {name}
    expected = alone.generate([PROMPTS[0]], params)[0]
    assert {one.index: one.tokens for one in found} == {one.index: one.tokens for one in expected}
    wanted = BeamSearchParams(3, 6, ignore_eos=True)
    search = engine.add_beam_search(PROMPTS[0], wanted, adapter="large")
    assert finish(engine)[search].tokens == alone.beam_search([PROMPTS[0]], wanted)[0][0].tokens


def test_the_server_serves_them_as_models(tiny_model: Model, folders: dict[str, str]) -> None:
    config = EngineConfig(SchedulerConfig(max_context=128), num_blocks=64, adapters=folders)
    running = start(tiny_model, ServerConfig("tiny"), config)
    try:
        client = running.client()
        assert [one.id for one in client.models.list()] == ["tiny", "tiny:large", "tiny:small"]
        assert client.models.retrieve("tiny:small").id == "tiny:small"
        ask = dict(prompt=PROMPTS[0], temperature=0.0, max_tokens=6)
        answers = [client.completions.create(model=one.id, **ask) for one in client.models.list()]
        assert [one.model for one in answers] == ["tiny", "tiny:large", "tiny:small"]
        engine = engine_of(tiny_model, folders)
        plain = SamplingParams(temperature=0.0, max_tokens=6)
        for name, answer in zip((None, *folders), answers, strict=True):
            request = engine.add_request(PROMPTS[0], plain, adapter=name)
            assert answer.choices[0].text == finish(engine)[request].text
        refused = running.post("/v1/completions", {"model": "tiny:huge", "prompt": "Hi"})
        assert refused.status_code == 404 and "'tiny:large'" in refused.json()["error"]["message"]
    finally:
        running.server.should_exit = True
        running.thread.join(20)


def test_an_unknown_adapter_is_refused(tiny_model: Model, folders: dict[str, str]) -> None:
    engine = engine_of(tiny_model, folders)
    for add in (engine.add_request, engine.add_beam_search):
        with pytest.raises(ValueError, match="no adapter 'huge'; this engine has 'large', 'small'"):
            add([1], adapter="huge")
    assert not engine.has_work


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (dict(use_dora=True), "use_dora must be False, got True"),
        (dict(bias="all"), "bias must be 'none'"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(rank_pattern={"q_proj": 8}), "rank_pattern"),
        (dict(peft_type="IA3"), "peft_type must be 'LORA'"),
        (dict(alora_invocation_tokens=[3, 4]), "alora_invocation_tokens must be None"),
        (dict(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
        (dict(init_lora_weights="pissa_niter_16"), "init_lora_weights 'pissa_niter_16' changes the base"),
        (dict(r=3), r"must have A \[3, in\]"),
        (dict(lora_alpha=None), "lora_alpha"),
    ],
)
def test_adapters_of_another_kind_are_refused(
    tiny_model: Model, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    assert len(read_adapter(write_adapter(tmp_path / "right", tiny_model, SOME, 2, 3))) == 4
    with pytest.raises(CheckpointError, match=message):
        read_adapter(write_adapter(tmp_path / "wrong", tiny_model, SOME, 2, 3, **entries))


def test_folders_that_hold_no_adapter_are_refused(tiny_model: Model, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter in peft's layout"):
        read_adapter(tmp_path)
    folder = write_adapter(tmp_path / "one", tiny_model, SOME, 2, 3)
    (folder / "adapter_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="must hold an object"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2}', encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(b"\x08" + b"\x00" * 7 + b"no header")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_adapter(folder)
    save_file({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head"):
        read_adapter(folder)


def test_adapters_that_do_not_suit_the_model_are_refused(tiny_model: Model, folders: dict[str, str]) -> None:
    weights, adapters = tiny_model.decoder.weights, Adapters(folders)
    with pytest.raises(ValueError, match="has no such layer"):
        AdaptedWeights({key: one for key, one in weights.items() if ".layers.1." not in key}, adapters)
    with pytest.raises(ValueError, match=r"changes .* of .*, and the model has"):
        AdaptedWeights({key: one[:-1] for key, one in weights.items()}, adapters)
    latent = {**weights, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(1)}
    with pytest.raises(ValueError, match="latent attention"):
        AdaptedWeights(latent, adapters)
    with pytest.raises(ValueError, match="run on weights fp32, bf16, fp16"):
        Engine(tiny_model, EngineConfig(num_blocks=4, weights="int8", adapters=folders))
    loaded = LoadedModel(Llama(tiny_model.config, weights), tiny_model.tokenizer)
    with pytest.raises(ValueError, match="need the weights of a model"):
        Engine(loaded, EngineConfig(num_blocks=4, adapters=folders))


def test_adapters_are_computed_on_a_cpu_step_by_step(tiny_model: Model, folders: dict[str, str]) -> None:
    for wanted in (dict(cuda_graphs=True), dict(compile=True)):
        with pytest.raises(ValueError, match="leave them off with adapters"):
            Engine(tiny_model, EngineConfig(num_blocks=4, adapters=folders, **wanted))
    with pytest.raises(ValueError, match="adapters run on device 'cpu' only, got 'cuda'"):
        load(tiny_model, device="cuda", adapt=lambda weights: AdaptedWeights(weights, Adapters(folders)))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(prefix_cache="radix"), id="trees, radix cache"),
        pytest.param(dict(num_blocks=14, num_host_blocks=40), id="trees, preempted"),
        pytest.param(dict(kv_dtype="kivi4"), id="lines, KIVI"),
    ],
)
def test_drafts_change_nothing(tiny_model: Model, folders: dict[str, str], settings: dict[str, Any]) -> None:
    wanted = [(prompt, name) for prompt in PROMPTS for name in (None, *folders)]
    limits = SchedulerConfig(preemption="swap")
    plain = EngineConfig(
        limits, num_blocks=100, block_size=4, prefix_cache="none", adapters=folders, kv_dtype=settings.get("kv_dtype")
    )
    engine, alone = Engine(tiny_model, plain), []
    for prompt, name in wanted:
        engine.add_request(prompt, PARAMS, adapter=name)
        alone += [one.tokens for one in finish(engine).values()]
    texts = [[*prompt, *tokens] for (prompt, _), tokens in zip(wanted, alone, strict=True)]
    drafter = Oracle if "kv_dtype" in settings else Bushy
    config = replace(plain, prefix_cache="hash", speculation=SpeculationConfig(lambda: drafter(texts)))
    engine = Engine(tiny_model, replace(config, **settings))
    for _ in range(2):  # the second time with whatever the cache has kept
        names = [engine.add_request(prompt, PARAMS, adapter=name) for prompt, name in wanted]
        done = finish(engine)
        assert [done[name].tokens for name in names] == alone
    assert 0 < engine.metrics.num_accepted_tokens < engine.metrics.num_drafted_tokens
    assert engine.metrics.num_cached_tokens > 0
    if "num_blocks" in settings:
        assert engine.metrics.num_preemptions > 0


def test_the_command_says_how_to_name_one() -> None:
    refused = CliRunner().invoke(app, ["serve", "--adapter", "folder"])
    assert refused.exit_code == 2 and "must be NAME=FOLDER, got 'folder'" in refused.output
    missing = CliRunner().invoke(app, ["serve", "--adapter", "pirate=/nowhere"])
    assert missing.exit_code == 2 and "/nowhere is no adapter" in missing.output
