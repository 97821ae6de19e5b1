"""transformers and its compressed-tensors quantizer load our checkpoints and compute what our own model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grader.judge.numerics import check_close
from labkit.decoder import Decoder, full_attention
from solutions.quantization.exporting import export
from solutions.quantization.loading import load_quantized
from solutions.quantization.methods import Settings
from solutions.quantization.pipeline import quantize_model
from solutions.quantization.quantized_model import QuantizedModel
from tests.quantization.small_models import TOKENS, calibration, decoder, origin, quantized

pytest.importorskip("compressed_tensors", reason="compressed-tensors, of the extra dev, is the reader under test")


def logits_of_transformers(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    # Left compressed, the reader expects zero points that are not packed, whatever its own writer stored (0.20.1);
    # dequantized while loading, it unpacks them.
    plain = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    unpacked = transformers.CompressedTensorsConfig(dequantize=True)
    options = {} if plain["weights"]["symmetric"] else {"quantization_config": unpacked}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found


def our_logits(model: QuantizedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.decoder()(tokens, torch.arange(tokens.shape[1]), full_attention)


def computed(
    model: QuantizedModel,
    tokens: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    rounded_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Logits of the dequantized weights, which may have been rounded once more, with float activations."""
    weights = {name: weight.to(rounded_to or dtype) for name, weight in model.weights().items()}
    with torch.no_grad():
        return Decoder(model.config, weights, dtype)(tokens, torch.arange(tokens.shape[1]), full_attention)


@pytest.mark.parametrize(("method", "settings"), [("rtn", dict(symmetric=False)), ("gptq", dict(bits=3)),
                                                  ("awq", dict()), ("rtn", dict(bits=8))])  # fmt: skip
def test_transformers_computes_the_logits_of_our_dequantized_model(
    tmp_path: Path, method: str, settings: dict[str, Any]
) -> None:
    model = quantized(method, **settings)
    export(model, "compressed-tensors", tmp_path, origin(tmp_path, method, **settings))
    # Where the reader dequantizes while loading, it multiplies in the scales' own float16.
    rounded_to = None if settings.get("symmetric", True) else torch.float16
    loaded = load_quantized(tmp_path)
    exact = computed(loaded, TOKENS, torch.float64, rounded_to)
    plain = computed(loaded, TOKENS, torch.float32, rounded_to)
    theirs = logits_of_transformers(tmp_path, TOKENS)
    check_close("logits", theirs, exact, scale=float(exact.abs().max()), dtype=torch.float32, plain=plain)


class TheirActivations(Decoder):
    """Our weights with the rule by which the reader quantizes activations.

    Its step for integers is max|x| / 127.5, ours max|x| / 127; for FP8 both are max|x| / 448.
    """

    integers = False

    def linear(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        if name.startswith("model.layers."):
            largest = inputs.abs().amax(-1, keepdim=True)
            if self.integers:
                scale = largest / 127.5
                inputs = (inputs / scale).round().clamp(-128, 127) * scale
            else:
                scale = largest / 448
                inputs = (inputs / scale).to(torch.float32).to(torch.float8_e4m3fn).to(torch.float32) * scale
        return super().linear(inputs, name)


@pytest.mark.parametrize("method", ["smoothquant", "fp8"])
def test_transformers_quantizes_the_activations_of_each_token(tmp_path: Path, method: str) -> None:
    model = quantized(method)
    export(model, "compressed-tensors", tmp_path, origin(tmp_path, method))
    expected = TheirActivations(model.config, model.weights())
    expected.integers = method == "smoothquant"
    theirs, ours = logits_of_transformers(tmp_path, TOKENS), our_logits(load_quantized(tmp_path), TOKENS)
    weights_only = computed(model, TOKENS)
    with torch.no_grad():
        rule = expected(TOKENS, torch.arange(TOKENS.shape[1]), full_attention)

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double() - b.double()).square().mean().sqrt())

    # A few activations lie so near to a half that float32 rounds them otherwise than float64; each is a step apart.
    effect = apart(weights_only, rule)
    assert apart(theirs, rule) < 0.3 * effect, "the reader has other weights, or another scheme for activations"
    assert 0.5 * effect < apart(ours, weights_only) < 2 * effect, "our rule harms the model about as much as theirs"


def test_a_qwen2_checkpoint_keeps_its_biases(tmp_path: Path) -> None:
    source = decoder(architecture="qwen2", attention_bias=True, tie_embeddings=False)
    model = quantize_model(source, "awq", Settings(group_size=32), calibration())
    export(model, "compressed-tensors", tmp_path, origin(tmp_path, "awq"))
    exact = computed(model, TOKENS)
    theirs, ours = logits_of_transformers(tmp_path, TOKENS), our_logits(load_quantized(tmp_path), TOKENS)
    check_close("logits", theirs, exact, scale=float(exact.abs().max()), dtype=torch.float32, plain=ours)
