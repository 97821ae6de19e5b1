"""Quantizing a model block by block: what it is calibrated on, how it goes on after an end, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grader.judge.numerics import check_equal
from labkit.decoder import full_attention
from labkit.linear_inputs import linear_inputs, linear_names
from solutions.quantization.hessian import layer_loss, update_hessian
from solutions.quantization.methods import METHODS, Settings
from solutions.quantization.pipeline import quantize_model
from solutions.quantization.quantized_model import QuantizedModel
from tests.quantization.small_models import TOKENS, calibration, decoder, quantized

SETTINGS = Settings(group_size=32)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_model_near_the_original(method: str) -> None:
    plain = decoder()
    model = quantized(method)
    tokens, positions = TOKENS[:1], torch.arange(TOKENS.shape[1])
    with torch.no_grad():
        expected = plain(tokens, positions, full_attention)
        found = model.decoder()(tokens, positions, full_attention)
    error = float((found - expected).square().mean() / expected.square().mean())
    # Power of the error: unrelated weights would give 2. Random weights spread errors, where trained ones damp them.
    limit = {"fp8": 0.15, "llm.int8": 0.03, "smoothquant": 0.03, "q8_0": 0.03, "q6_k": 0.03, "q5_0": 0.25, "q5_1": 0.25}
    assert error < limit.get(method, 0.8), f"{method}: logits are off by {error:.3f} of their power"
    assert 3.9 < model.bits_per_weight() < 9.5 and model.num_bytes() > 0


def test_a_calibrated_method_beats_plain_rounding_on_what_the_layers_read() -> None:
    inputs, weights = linear_inputs(decoder(), TOKENS), decoder().weights

    def loss(model: QuantizedModel, name: str) -> float:
        hessian, _ = update_hessian(None, 0, inputs[name])
        return layer_loss(weights[f"{name}.weight"], model.linears[name].weight(), hessian)

    rounded, calibrated = quantized("rtn"), quantized("gptq")
    for name in linear_names(decoder().config)[:3]:
        assert loss(calibrated, name) < 0.8 * loss(rounded, name), name


def test_later_blocks_are_calibrated_behind_the_quantized_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    method = METHODS["gptq"]

    def spy(block, settings):  # type: ignore[no-untyped-def]
        seen.append({name: inputs.clone() for name, inputs in block.inputs.items()})
        return method.quantize(block, settings)

    monkeypatch.setitem(METHODS, "gptq", type(method)(method.summary, spy, True, method.formats))
    model = quantize_model(decoder(), "gptq", SETTINGS, calibration())
    first, second = linear_names(model.config)[0], linear_names(model.config)[7]
    stored = decoder()
    stored.weights |= {name: w for name, w in model.weights().items() if not name.startswith("model.layers.")}
    check_equal("first block", seen[0][first], linear_inputs(stored, TOKENS)[first])
    stored.weights |= {name: w for name, w in model.weights().items() if name.startswith("model.layers.0.")}
    check_equal("second block", seen[1][second], linear_inputs(stored, TOKENS)[second])


@pytest.mark.parametrize("method", ["gptq", "awq", "nf4"])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_bits(tmp_path: Path, method: str) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(decoder(), method, SETTINGS, calibration(), tmp_path, stop)
    first = tmp_path / "layer-0000.safetensors"
    written = first.stat().st_mtime_ns
    resumed = quantize_model(decoder(), method, SETTINGS, calibration(), tmp_path)
    assert first.stat().st_mtime_ns == written, "a finished block was quantized again"
    plain = quantize_model(decoder(), method, SETTINGS, calibration())
    for name, weight in plain.weights().items():
        check_equal(name, resumed.weights()[name], weight)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    quantize_model(decoder(), "gptq", SETTINGS, calibration(), tmp_path)
    for model, settings, text in ((decoder(1), SETTINGS, TOKENS), (decoder(), Settings(bits=3, group_size=32), TOKENS),
                                  (decoder(), SETTINGS, TOKENS.flip(0))):  # fmt: skip
        with pytest.raises(ValueError, match="unfinished run"):
            quantize_model(model, "gptq", settings, calibration(text), tmp_path)


def test_a_damaged_block_is_refused_by_name(tmp_path: Path) -> None:
    quantize_model(decoder(), "rtn", SETTINGS, None, tmp_path)
    (tmp_path / "layer-0001.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"layer-0001.*damaged"):
        quantize_model(decoder(), "rtn", SETTINGS, None, tmp_path)


def test_weights_and_activations_that_are_not_finite_are_refused_by_name() -> None:
    quantize_model(decoder(), "gptq", SETTINGS, calibration())
    name = "model.layers.1.mlp.up_proj"
    bad = decoder()
    bad.weights[f"{name}.weight"][3, 4] = float("nan")
    with pytest.raises(ValueError, match=f"{name}.weight must be finite"):
        quantize_model(bad, "gptq", SETTINGS, calibration())
    large = decoder()
    large.weights["model.layers.1.post_attention_layernorm.weight"][:] = 3e38
    with pytest.raises(ValueError, match=r"calibration: model.layers.1.mlp.gate_proj reads"):
        quantize_model(large, "gptq", SETTINGS, calibration())


@pytest.mark.parametrize(("settings", "method", "message"), [
    (Settings(group_size=64), "rtn", "fitting sizes are 16, 32"), (Settings(bits=9, group_size=32), "gptq", "bits"),
    (SETTINGS, "hqq", "method must be one of"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused_before_anything_runs(
    tmp_path: Path, settings: Settings, method: str, message: str
) -> None:
    quantize_model(decoder(), "rtn", SETTINGS, None, tmp_path / "good")
    with pytest.raises(ValueError, match=message):
        quantize_model(decoder(), method, settings, calibration(), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_calibrated_method_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="needs calibration text"):
        quantize_model(decoder(), "awq", SETTINGS)
