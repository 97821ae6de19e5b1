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
    # It rounds activations to 8 bits, so that tokens differ by chance; their mean may be off by that, too.
    chance = 2 * float(apart.std()) / len(apart) ** 0.5
    ratio = float((-apart).mean().exp()) - 1
    print(f"{method}: perplexity off by {ratio:+.2%}, single tokens by {float(apart.std()):.3f}, chance {chance:.2%}")
    allowed = 0.01 if length.scored_tokens > 1_000 else 0.01 + chance
    assert abs(ratio) < allowed
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
from labkit.checkpoints import load
from solutions.quantization.calibration import calibration_text
from solutions.quantization.methods import Settings
from solutions.quantization.pipeline import quantize_model, with_own_memory
model = load("smollm2")
decoder = with_own_memory(model.decoder)
text = calibration_text("prose", model.tokenizer, 4, 256)
before = psutil.Process().memory_info().rss
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
quantize_model(decoder, "gptq", Settings(), text, Path(sys.argv[1]))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(before, 1024 * int(peak.split()[1]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory: not verified here, no Linux")
def test_quantizing_takes_the_memory_of_about_one_layer_over_the_model(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    before, peak = (int(number) for number in result.stdout.split())
    layer, codes = 4 * 3_540_000, 106_200_000
    # The codes of all layers are the result and stay, a byte each. Beyond it: a layer in float32, its Hessians in
    # float64, what it reads, and what the allocator holds back.
    over = peak - before - codes
    print(f"{over / 1e6:.0f} MB over model and result; a layer has {layer / 1e6:.0f} MB")
    assert over < 12 * layer
