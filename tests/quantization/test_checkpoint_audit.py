"""The audit on what others wrote: GGUF's own table of types, and every layout that our exporters write."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from labkit.checkpoint_audit import GGUF_TYPES, TYPE_BYTES
from solutions.quantization.checkpoint_facts import audit_checkpoint
from solutions.quantization.exporting import export
from tests.quantization.small_models import CONFIG, origin, quantized


def test_block_types_are_those_of_gguf() -> None:
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for name, block in GGUF_TYPES.items():
        assert (block.elements, block.num_bytes) == sizes[name], name
        assert 8 * block.num_bytes / block.elements > block.bits, f"{name} has scales beside its codes"
    for name in ("F16", "F32", "BF16", "F64", "I8", "I16", "I32", "I64"):
        assert sizes[name] == (1, TYPE_BYTES[name]), name


@pytest.mark.parametrize(
    ("layout", "method", "settings"),
    [
        ("compressed-tensors", "rtn", dict(bits=4)),
        ("compressed-tensors", "rtn", dict(bits=4, symmetric=False)),
        ("compressed-tensors", "rtn", dict(bits=3)),
        ("gptq", "gptq", dict(bits=4)),
        ("gptq_v2", "rtn", dict(bits=3)),
        ("awq", "awq", dict(bits=4, symmetric=False)),
    ],
)
def test_exported_checkpoints_say_what_was_exported(
    layout: str, method: str, settings: dict[str, int | bool], tmp_path: Path
) -> None:
    model = quantized(method, **settings)
    export(model, layout, tmp_path / "out", origin(tmp_path, method, **settings))
    report = audit_checkpoint(tmp_path / "out")
    assert report.format == layout.removesuffix("_v2")
    assert not report.contradictions
    assert [layer.name for layer in report.layers] == sorted(model.linears)
    assert {(layer.bits, layer.group_size) for layer in report.layers} == {(settings["bits"], 32)}
    assert {layer.symmetric for layer in report.layers} == {settings.get("symmetric", True)}
    assert sum(layer.num_weights for layer in report.layers) == CONFIG.num_layers * _linear_weights()
    assert report.num_bytes == sum(_tensor_bytes(tmp_path / "out"))
    assert "model.embed_tokens" in report.high_precision
    assert "method" in report.unknown


def _linear_weights() -> int:
    """Of one block."""
    heads, kv = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    return CONFIG.hidden_size * (2 * heads + 2 * kv + 3 * CONFIG.intermediate_size)


def _tensor_bytes(folder: Path) -> list[int]:
    """What the tensors of a folder take, by reading them."""
    from safetensors.torch import load_file

    return [x.numel() * x.element_size() for x in load_file(folder / "model.safetensors").values()]
