"""The bundled model quantized, and read by those who should: llama.cpp and transformers; memory while it is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from labkit.checkpoints import bundled_folder, bundled_gguf, load
from labkit.decoder import Decoder, full_attention
from labkit.texts import documents
from solutions.quantization.calibration import calibration_text
from solutions.quantization.exporting import Origin, export
from solutions.quantization.loading import load_quantized
from solutions.quantization.methods import Settings
from solutions.quantization.pipeline import quantize_model
from solutions.quantization.quantized_model import QuantizedModel
from tests.evidence.conftest import Length
from tests.quantization.llama_cpp import log_probabilities

pytestmark = pytest.mark.evidence


def quantized(method: str, settings: Settings) -> QuantizedModel:
    model = load("smollm2")
    text = calibration_text("prose", model.tokenizer, 4, 128)
    return quantize_model(model.decoder, method, settings, text)


def origin(method: str, settings: Settings) -> Origin:
    return Origin(bundled_folder(), bundled_gguf(), method, settings, "prose")


def ascii_tokens(count: int) -> list[int]:
    """Prose and code by turns, without a token that ends within a character."""
    model = load("smollm2")
    texts = [text for kind in ("prose", "code") for text in documents(kind, "evaluation").values() if text.isascii()]
    ids = [token for text in texts for token in model.tokenizer.encode(text[:2_000])]
    return ids[:count]


def our_log_probabilities(decoder: Decoder, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits = decoder(torch.tensor([ids]), torch.arange(len(ids)), full_attention)[0]
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].double()


@pytest.mark.parametrize(("method", "settings"), [
    ("q8_0", Settings()), ("q4_0", Settings()), ("q4_1", Settings()), ("q5_0", Settings()), ("q5_1", Settings()),
    ("q4_k", Settings()), ("q6_k", Settings()), ("gptq", Settings(group_size=32)),
])  # fmt: skip
def test_llama_cpp_has_the_perplexity_of_our_dequantized_model(
    tmp_path: Path, length: Length, method: str, settings: Settings
) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp: not verified here")
    export(quantized(method, settings), "gguf", tmp_path, origin(method, settings), head_bits=8)
    ids = ascii_tokens(length.scored_tokens)
    theirs = log_probabilities(tmp_path / "model.gguf", ids)
    ours = our_log_probabilities(load_quantized(tmp_path).decoder(), ids)
    apart = theirs - ours
    # It rounds activations to 8 bits, so that tokens differ by chance, and so does their mean: in 95 of 100 texts by
    # less than two standard errors. What is beyond 1 % even so is a fault.
    chance = 2 * float(apart.std()) / len(apart) ** 0.5
    ratio = float((-apart).mean().exp()) - 1
    print(f"{method}: perplexity off by {ratio:+.2%}, single tokens by {float(apart.std()):.3f}, chance {chance:.2%}")
    assert abs(ratio) < 0.01 + chance
    assert float(apart.std()) < 0.15 * float(ours.std())


def test_transformers_computes_our_dequantized_models_logits(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors: not verified here")
    import transformers

    settings = Settings(group_size=64)
    export(quantized("gptq", settings), "compressed-tensors", tmp_path, origin("gptq", settings))
    ids = ascii_tokens(200)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = load_quantized(tmp_path).decoder()
    with torch.no_grad():
        found = theirs(torch.tensor([ids])).logits[0]
        expected = ours(torch.tensor([ids]), torch.arange(len(ids)), full_attention)[0]
    assert float((found - expected).abs().max()) < 1e-3 * float(expected.abs().max())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


MEASURE = """
import sys
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from labkit.config import ModelConfig
from labkit.decoder import Decoder, random_weights
from solutions.quantization.calibration import Calibration
from solutions.quantization.methods import Settings
from solutions.quantization.pipeline import quantize_model, with_own_memory


def quantize(num_layers):
    sizes = dict(hidden_size=256, intermediate_size=768, num_heads=8, num_kv_heads=4, head_dim=32)
    config = ModelConfig.tiny(num_layers=num_layers, **sizes)
    save_file(random_weights(config, 0), sys.argv[1])
    decoder = with_own_memory(Decoder(config, load_file(sys.argv[1])))
    text = Calibration("random", torch.randint(0, config.vocab_size, (2, 100)))
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    model = quantize_model(decoder, "gptq", Settings(), text)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    codes = sum(linear.stored.codes.numel() for linear in model.linears.values())
    return 1024 * int(peak.split()[1]) - before - codes


quantize(1)  # libraries are loaded on first use
print(quantize(int(sys.argv[2])))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory: not verified here, no Linux")
def test_memory_over_model_and_result_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    def over(num_layers: int) -> int:
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "model.safetensors"), str(num_layers)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    few, many, layer = over(4), over(24), 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768)
    print(f"over model and result: {few / 1e6:.0f} MB for 4 layers, {many / 1e6:.0f} for 24; one has {layer / 1e6:.1f}")
    # A second copy of the model would take 20 layers more; the allocator keeps a few back.
    assert many - few < 8 * layer
