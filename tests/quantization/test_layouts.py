"""Checkpoint layouts: GPTQ and AWQ by unpackers written from the published layouts, and every one back by our loader.

The real readers of the GPTQ and AWQ layouts have no wheels for this machine: *not verified here*.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from grader.judge.numerics import check_equal
from labkit.quantized import QuantizedTensor
from solutions.quantization.exporting import export
from solutions.quantization.gptq_layout import to_tensors
from solutions.quantization.loading import load_quantized
from solutions.quantization.quantized_model import QuantizedLinear, QuantizedModel
from tests.quantization.small_models import origin, quantized

LAYOUTS = [("rtn", dict(bits=4)), ("rtn", dict(bits=4, symmetric=False)), ("gptq", dict(bits=3, act_order=True)),
           ("rtn", dict(bits=8, symmetric=False))]  # fmt: skip


def bits_of(words: np.ndarray) -> np.ndarray:
    """The bits of uint32 words along the last axis, lowest first."""
    return (words.view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32) & 1).reshape(*words.shape[:-1], -1)


def stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits each, one after another."""
    found = bits_of(words)
    found = found[..., : found.shape[-1] // bits * bits]
    return (found.reshape(*found.shape[:-1], -1, bits) << np.arange(bits)).sum(-1)


def read_gptq(tensors: dict[str, torch.Tensor], name: str, bits: int, add_one: bool) -> torch.Tensor:
    """weight[out, in] = scale[g_idx[in], out] · (code[in, out] − zero[g_idx[in], out])."""
    part = {key: tensors[f"{name}.{key}"].numpy() for key in ("qweight", "qzeros", "scales", "g_idx")}
    codes = stream(np.ascontiguousarray(part["qweight"].T), bits).T
    zeros = stream(part["qzeros"], bits)
    if add_one:
        zeros = (zeros + 1) & (2**bits - 1)
    group = part["g_idx"]
    values = part["scales"].astype(np.float32)[group] * (codes - zeros[group]).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values.T))


def read_awq(tensors: dict[str, torch.Tensor], name: str, group_size: int) -> torch.Tensor:
    """Of eight outputs, those of even number lie in the low half of a word, those of odd number in the high half."""

    def unpack(words: np.ndarray) -> np.ndarray:
        nibbles = stream(words, 4).reshape(*words.shape, 8)
        outputs = np.empty_like(nibbles)
        outputs[..., 0::2], outputs[..., 1::2] = nibbles[..., :4], nibbles[..., 4:]
        return outputs.reshape(*words.shape[:-1], -1)

    codes, zeros = (unpack(tensors[f"{name}.{key}"].numpy()) for key in ("qweight", "qzeros"))
    scales = tensors[f"{name}.scales"].numpy().astype(np.float32)
    group = np.arange(len(codes)) // group_size
    return torch.from_numpy(np.ascontiguousarray((scales[group] * (codes - zeros[group]).astype(np.float32)).T))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("method", "settings"), LAYOUTS)
def test_an_independent_unpacker_reads_the_gptq_layout(
    tmp_path: Path, method: str, settings: dict, version: int
) -> None:
    model = quantized(method, **settings)
    export(model, "gptq" if version == 1 else "gptq_v2", tmp_path, origin(tmp_path, method, **settings))
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "quantize_config.json").read_text())
    assert config["bits"] == settings["bits"] and config["group_size"] == 32
    for name, linear in model.linears.items():
        check_equal(name, read_gptq(tensors, name, settings["bits"], add_one=version == 1), linear.weight())


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_independent_unpacker_reads_the_awq_layout(tmp_path: Path, symmetric: bool) -> None:
    model = quantized("awq", symmetric=symmetric)
    export(model, "awq", tmp_path, origin(tmp_path, "awq"))
    tensors = load_file(tmp_path / "model.safetensors")
    for name, linear in model.linears.items():
        check_equal(name, read_awq(tensors, name, 32), linear.weight())


def test_a_zero_point_of_zero_is_stored_minus_one_without_touching_its_neighbours() -> None:
    codes = torch.arange(16, dtype=torch.int8).repeat(8, 2)
    zeros = torch.tensor([0, 1, 15, 0, 7, 8, 0, 14], dtype=torch.int8)[:, None]
    linear = QuantizedLinear(QuantizedTensor(codes, torch.full((8, 1), 0.5), zeros, 4, 32))
    tensors = to_tensors("layer", linear, 1)
    assert stream(tensors["layer.qzeros"].numpy(), 4).tolist() == [[15, 0, 14, 15, 6, 7, 15, 13]]
    check_equal("weight", read_gptq(tensors, "layer", 4, add_one=True), linear.weight())


FORMATS = [("rtn", "compressed-tensors", dict()), ("rtn", "compressed-tensors", dict(symmetric=False)),
           ("gptq", "compressed-tensors", dict(bits=3)), ("smoothquant", "compressed-tensors", dict()),
           ("fp8", "compressed-tensors", dict()), ("gptq", "gptq", dict(symmetric=False)), ("rtn", "gptq_v2", dict()),
           ("awq", "awq", dict())]  # fmt: skip


@pytest.mark.parametrize(("method", "format", "settings"), FORMATS)
def test_our_loader_gives_back_what_was_exported(tmp_path: Path, method: str, format: str, settings: dict) -> None:
    model = quantized(method, **settings)
    export(model, format, tmp_path, origin(tmp_path, method, **settings))
    check_same_model(load_quantized(tmp_path), model)


def check_same_model(found: QuantizedModel, expected: QuantizedModel) -> None:
    assert found.config == expected.config
    assert set(found.linears) == set(expected.linears) and set(found.floats) == set(expected.floats)
    for name, weight in expected.weights().items():
        check_equal(name, found.weights()[name], weight)
    for name, linear in expected.linears.items():
        assert found.linears[name].activations == linear.activations


@pytest.mark.parametrize(
    ("method", "format"),
    [
        ("nf4", "compressed-tensors"),
        ("smoothquant", "gptq"),
        ("fp8", "awq"),
        ("smoothquant", "gguf"),
        ("rtn", "tarball"),
    ],
)
def test_a_format_that_cannot_hold_a_method_refuses_and_writes_nothing(
    tmp_path: Path, method: str, format: str
) -> None:
    model, good, bad = quantized(method), tmp_path / "good", tmp_path / "bad"
    export(quantized("rtn"), "compressed-tensors", good, origin(tmp_path))
    with pytest.raises(ValueError):
        export(model, format, bad, origin(tmp_path, method))
    assert not bad.exists()


def test_a_folder_that_is_no_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    model = quantized("rtn")
    export(model, "gptq", tmp_path / "good", origin(tmp_path))
    load_quantized(tmp_path / "good")
    with pytest.raises(ValueError, match="no checkpoint"):
        load_quantized(tmp_path / "nothing")
    config = tmp_path / "good" / "config.json"
    entries = json.loads(config.read_text())
    config.write_text(json.dumps(entries | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ValueError, match="hqq"):
        load_quantized(tmp_path / "good")
    config.write_text(json.dumps({key: value for key, value in entries.items() if key != "quantization_config"}))
    with pytest.raises(ValueError, match="not quantized"):
        load_quantized(tmp_path / "good")


@pytest.mark.parametrize(
    ("format", "scales"), [("gptq", "scales"), ("awq", "scales"), ("compressed-tensors", "weight_scale")]
)
def test_a_tensor_that_nobody_reads_and_scales_of_another_shape_are_refused(
    tmp_path: Path, format: str, scales: str
) -> None:
    layer = "model.layers.0.self_attn.q_proj"
    export(quantized("rtn", symmetric=False), format, tmp_path, origin(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{layer}.more": torch.zeros(2)}, file)
    load_quantized(tmp_path)
    save_file(tensors | {f"{layer}.weight_g_idx": torch.ones(2)}, file)
    with pytest.raises(ValueError, match=rf"{layer}\.weight_g_idx, which is not read"):
        load_quantized(tmp_path)
    save_file(tensors | {f"{layer}.{scales}": tensors[f"{layer}.{scales}"][:, :-1].contiguous()}, file)
    with pytest.raises(ValueError, match=f"{layer} must have (scales|zero points) of the shape"):
        load_quantized(tmp_path)
